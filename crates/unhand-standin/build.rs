//! Builds the half of this crate that programs load, as a shared library, for the half that loads it to carry inside.
//!
//! Cargo is called once more for that, on this same package: a Rust library and a C library with CUDA's functions in
//! it are two compilations with different content, and only the second may export those names.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set for the inner call.
const INNER: &str = "UNHAND_STANDIN_BUILDS_LOADED";
const LIBRARY: &str = "libunhand_standin.so";

fn main() {
    println!("cargo::rerun-if-env-changed={INNER}");
    println!("cargo::rustc-check-cfg=cfg(unhand_standin_loaded)");
    if env::var_os(INNER).is_some() {
        println!("cargo::rerun-if-changed=build.rs");
        println!("cargo::rustc-cfg=unhand_standin_loaded");
        // The loader compares a needed name with the names of what is loaded, so no file has to have this name.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
        return;
    }
    for path in ["build.rs", "Cargo.toml", "src", "../unhand-alloc/src"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let place = PathBuf::from(variable("OUT_DIR")).join(LIBRARY);
    let target = variable("TARGET");
    if target == "x86_64-unknown-linux-gnu" {
        let built = build(&target);
        std::fs::copy(&built, &place).unwrap_or_else(|error| panic!("`{}`: {error}", built.display()));
    } else {
        // Elsewhere the crate says that it cannot; nobody reads this file.
        std::fs::write(&place, []).unwrap_or_else(|error| panic!("`{}`: {error}", place.display()));
    }
}

fn build(target: &str) -> PathBuf {
    // A folder of its own: the outer cargo holds the lock of the other one.
    let folder = Path::new(&variable("OUT_DIR")).join("loaded");
    let manifest = Path::new(&variable("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let status = Command::new(variable("CARGO"))
        .args(["rustc", "--quiet", "--lib", "--crate-type", "cdylib", "--release", "--target", target])
        .arg("--manifest-path")
        .arg(manifest)
        .arg("--target-dir")
        .arg(&folder)
        .env(INNER, "1")
        // Line tables would be most of the file.
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        // What the outer cargo compiles with is not for this library: lints, coverage, sanitizers.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .status();
    let is_built = status.as_ref().is_ok_and(std::process::ExitStatus::success);
    assert!(is_built, "cargo cannot build the library of the stand-in: {status:?}");
    folder.join(target).join("release").join(LIBRARY)
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("cargo sets {name}: {error}"))
}
