//! Gives the cdylib the name under which PyTorch looks for the driver.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The loader compares a needed name with the names of what is loaded, so no file has to have this name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
