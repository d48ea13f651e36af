//! `unhand stand-in` where it does not come to running PyTorch; `tests/python/torch/dry_run.py` has the rest.

use insta::assert_snapshot;

use crate::run::{run, run_in};

/// A folder that looks like an installed PyTorch of this version.
fn torch(version: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs_err::create_dir(folder.path().join("lib")).expect("made");
    fs_err::write(folder.path().join("lib/libtorch.so"), "").expect("written");
    fs_err::write(folder.path().join("version.py"), version).expect("written");
    folder
}

#[test]
fn refuses_what_is_no_build_for_cuda() {
    for (version, name) in [
        ("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n", "2.11.0+cpu"),
        (
            "__version__ = '2.11.0+rocm6'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n",
            "2.11.0+rocm6",
        ),
    ] {
        let folder = torch(version);
        let path = folder.path().to_str().expect("a path in UTF-8");
        let text = run(&["stand-in", "--torch", path, "--", "true"]);
        assert!(text.starts_with("exit code: 3\n"), "{text}");
        assert!(text.contains(&format!("this PyTorch is not built for CUDA: `{name}`")), "{text}");
        assert!(text.contains("hint: install PyTorch's wheel for CUDA"), "{text}");
    }
}

#[test]
fn says_where_there_is_no_pytorch() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("a path in UTF-8");
    assert_snapshot!(run_in(folder.path(), &["stand-in", "--torch", path, "--", "true"]), @"
    exit code: 3
    ----- stdout
    ----- stderr
    error: the stand-in cannot be used here
      caused by: no PyTorch here: `[FOLDER]`

    hint: name the interpreter that has PyTorch (`unhand stand-in -- .venv/bin/python …`), or the folder of
    the module `torch` with --torch
    ");
}

#[test]
fn knows_its_gpus() {
    assert_snapshot!(run(&["stand-in", "--gpu", "v100", "--", "true"]), @"
    exit code: 2
    ----- stdout
    ----- stderr
    error: invalid value 'v100' for '--gpu <NAME>': known are h200, a100-80, h100-80, a100-40, rtx4090, l4, t4, rtx3060-12

    For more information, try '--help'.
    ");
}

#[test]
fn a_dry_run_refuses_before_it_runs_anything() {
    for (words, message) in [
        (&["dry-run", "no-such-script.py"][..], "there is no script `no-such-script.py`"),
        (&["dry-run", "--max-step", "3"], "there is no option `--max-step`"),
        (&["dry-run", "torchrun", "train.py"], "`torchrun` starts other processes"),
        (&["dry-run", "--bisect", "batch", "train.py"], "the form is NAME=LO..HI"),
    ] {
        let text = run(words);
        assert!(text.starts_with("exit code: 2\n") && text.contains(message), "{text}");
    }
}
