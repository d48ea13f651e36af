//! Which line of a stack a person should look at: the innermost frame outside torch, and their own line.

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{FrameId, Snapshot, StackId, StringId};

use crate::category::Category;

/// Where a source file comes from, judged by its path alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Code of the person who recorded the snapshot.
    User,
    /// An installed package other than torch.
    Library,
    /// PyTorch itself, or a package that only runs under it (triton, functorch).
    Torch,
    /// Python's own library and its frozen modules.
    Runtime,
    /// Code written by a program: `TorchInductor`, FX, `exec`.
    Generated,
    /// C++ frames.
    Native,
}

/// The line that answers "who allocated this?".
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Site {
    /// What to print: `record.py:40 (leak)`, or a parenthesis that says why no line is known.
    pub name: String,
    /// The function; `None` without a frame.
    pub function: Option<String>,
    /// The whole path of the file; `None` without a frame.
    pub file: Option<String>,
    /// The line; `None` without a frame.
    pub line: Option<u64>,
    /// The innermost line of the person's own code when [`Site::name`] is a library's: `record.py:17`.
    pub called_from: Option<String>,
    /// Whether the stack has no frame outside torch; the innermost torch frame is named then.
    pub only_torch: bool,
}

/// One frame of a stack, as text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct FrameText {
    /// The function.
    pub function: String,
    /// The whole path of the file.
    pub file: String,
    /// The line; `None` for frames without one.
    pub line: Option<u64>,
}

/// An index into [`Sites`]: stacks that lead to the same line share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SiteId(pub u32);

/// The sites and categories of all stacks of one snapshot; each stack is looked at once.
#[derive(Debug)]
pub struct Sites<'a> {
    snapshot: &'a Snapshot,
    has_stacks: bool,
    short: FxHashMap<StringId, String>,
    origins: FxHashMap<StringId, Origin>,
    rules: FxHashMap<FrameId, Option<Category>>,
    known: FxHashMap<StackId, (SiteId, Category)>,
    by_frames: FxHashMap<(Option<FrameId>, Option<FrameId>), SiteId>,
    all: Vec<Site>,
}

/// The name of the site of an allocation without Python frames in a recording that has stacks.
pub const NO_PYTHON_FRAMES: &str = "(no Python frames)";
/// The name of the site of every allocation of a recording without stacks.
pub const NO_STACK_RECORDED: &str = "(no stack recorded)";

impl<'a> Sites<'a> {
    /// Prepares the sites of a snapshot.
    pub fn new(snapshot: &'a Snapshot) -> Self {
        Sites {
            snapshot,
            has_stacks: has_stacks(snapshot),
            short: FxHashMap::default(),
            origins: FxHashMap::default(),
            rules: FxHashMap::default(),
            known: FxHashMap::default(),
            by_frames: FxHashMap::default(),
            all: Vec::new(),
        }
    }

    /// Whether any stack was recorded at all.
    pub fn has_stacks(&self) -> bool {
        self.has_stacks
    }

    /// The site of a stack, and the category its frames tell ([`Category::Unknown`] when they tell none).
    pub fn of(&mut self, stack: StackId) -> (SiteId, Category) {
        if let Some(&known) = self.known.get(&stack) {
            return known;
        }
        let frames: Vec<FrameId> =
            if stack.is_none() { Vec::new() } else { self.snapshot.stacks.frames(stack).collect() };
        let mut line = None;
        let mut own_line = None;
        for &frame in &frames {
            let origin = self.origin(self.snapshot.stacks.frame(frame).filename);
            if line.is_none() && matches!(origin, Origin::User | Origin::Library) {
                line = Some(frame);
            }
            if origin == Origin::User {
                own_line = Some(frame);
                break;
            }
        }
        let only_torch = line.is_none() && !frames.is_empty();
        if only_torch {
            line = frames.first().copied();
        }
        let key = (line, own_line.filter(|own| Some(*own) != line));
        let site = if let Some(&site) = self.by_frames.get(&key) {
            site
        } else {
            let id = SiteId(u32::try_from(self.all.len()).unwrap_or(u32::MAX));
            let site = self.describe(key.0, key.1, only_torch);
            self.all.push(site);
            self.by_frames.insert(key, id);
            id
        };
        let category = if frames.is_empty() {
            Category::without_frames(self.has_stacks)
        } else {
            frames.iter().find_map(|&frame| self.rule(frame)).unwrap_or(Category::Unknown)
        };
        self.known.insert(stack, (site, category));
        (site, category)
    }

    /// The site behind an id of these `Sites`.
    pub fn get(&self, id: SiteId) -> &Site {
        &self.all[id.0 as usize]
    }

    /// All frames of a stack, innermost first.
    pub fn frames(&self, stack: StackId) -> Vec<FrameText> {
        if stack.is_none() {
            return Vec::new();
        }
        let frames = self.snapshot.stacks.frames(stack);
        frames
            .map(|id| {
                let frame = self.snapshot.stacks.frame(id);
                FrameText {
                    function: self.snapshot.strings.get(frame.name).to_owned(),
                    file: self.snapshot.strings.get(frame.filename).to_owned(),
                    line: line_number(frame.line),
                }
            })
            .collect()
    }

    fn origin(&mut self, file: StringId) -> Origin {
        let snapshot = self.snapshot;
        *self.origins.entry(file).or_insert_with(|| Origin::of(snapshot.strings.get(file)))
    }

    /// What one frame tells; each frame is looked at once, most stacks share theirs.
    fn rule(&mut self, frame: FrameId) -> Option<Category> {
        let snapshot = self.snapshot;
        *self.rules.entry(frame).or_insert_with(|| {
            let frame = snapshot.stacks.frame(frame);
            Category::of_frame(snapshot.strings.get(frame.name), snapshot.strings.get(frame.filename))
        })
    }

    fn describe(&mut self, line: Option<FrameId>, own: Option<FrameId>, only_torch: bool) -> Site {
        let Some(line) = line else {
            return Site::without_line(if self.has_stacks { NO_PYTHON_FRAMES } else { NO_STACK_RECORDED });
        };
        let frame = self.snapshot.stacks.frame(line);
        let function = self.snapshot.strings.get(frame.name);
        let file = self.snapshot.strings.get(frame.filename);
        Site {
            name: format!("{} ({function})", self.place(frame.filename, frame.line)),
            function: Some(function.to_owned()),
            file: Some(file.to_owned()),
            line: line_number(frame.line),
            called_from: own.map(|own| {
                let own = self.snapshot.stacks.frame(own);
                self.place(own.filename, own.line)
            }),
            only_torch,
        }
    }

    fn place(&mut self, file: StringId, line: i64) -> String {
        let short = self.short(file);
        line_number(line).map_or_else(|| short.clone(), |line| format!("{short}:{line}"))
    }

    /// The path to print. All files are shortened together, so that two files never print alike.
    fn short(&mut self, file: StringId) -> String {
        if self.short.is_empty() {
            self.short = shorten_all(self.snapshot);
        }
        self.short.get(&file).cloned().unwrap_or_else(|| self.snapshot.strings.get(file).to_owned())
    }
}

/// Endings of C and C++ files.
const NATIVE: [&str; 8] = [".cpp", ".cc", ".cu", ".cxx", ".h", ".hpp", ".cuh", ".c"];

/// Packages without a life of their own outside torch: their lines explain nothing to a user.
const TORCH_PACKAGES: [&str; 5] = ["torch", "triton", "functorch", "torchgen", "_C"];

/// What lies directly in a source checkout's `torch/`.
const TORCH_PARTS: [&str; 14] = [
    "nn",
    "optim",
    "autograd",
    "utils",
    "cuda",
    "_dynamo",
    "_inductor",
    "_functorch",
    "distributed",
    "amp",
    "fx",
    "functional.py",
    "_tensor.py",
    "_ops.py",
];

impl Site {
    /// A site that is no line, named for the reason.
    pub(crate) fn without_line(name: &str) -> Site {
        Site {
            name: name.to_owned(),
            function: None,
            file: None,
            line: None,
            called_from: None,
            only_torch: false,
        }
    }

    /// `record.py:40`, without the function.
    pub fn place(&self) -> &str {
        if self.file.is_some() {
            self.name.rsplit_once(" (").map_or(&*self.name, |(place, _)| place)
        } else {
            &self.name
        }
    }
}

impl std::fmt::Display for FrameText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, " ({})", self.function)
    }
}

impl Origin {
    /// Judges a path; see the rules inside. Backslashes count as slashes.
    pub fn of(path: &str) -> Origin {
        let path = path.replace('\\', "/");
        // A prompt or a notebook cell is the person's own code although it is no file.
        if path.starts_with("<stdin>")
            || path.starts_with("<ipython-input")
            || path.starts_with("<python-input")
        {
            return Origin::User;
        }
        if path.starts_with("<frozen ") {
            return Origin::Runtime;
        }
        if path.starts_with('<') || path.contains("torchinductor_") || path.contains("/torch_compile_debug/")
        {
            return Origin::Generated;
        }
        if path.is_empty()
            || path == "??"
            || path.contains(".so")
            || NATIVE.iter().any(|end| path.ends_with(end))
        {
            return Origin::Native;
        }
        if let Some(package) = installed_package(&path) {
            return if TORCH_PACKAGES.contains(&package) { Origin::Torch } else { Origin::Library };
        }
        // A source checkout of PyTorch is not under site-packages; its own folders give it away.
        let torch_part = |rest: &str| TORCH_PARTS.contains(&rest.split('/').next().unwrap_or(""));
        if path.rsplit_once("/torch/").is_some_and(|(_, rest)| torch_part(rest))
            || path.split_once("/torch/").is_some_and(|(_, rest)| torch_part(rest))
        {
            return Origin::Torch;
        }
        if path.contains("/lib/python3") || path.contains("/Lib/") {
            return Origin::Runtime;
        }
        Origin::User
    }
}

/// Whether any stack was recorded, with an event or with a block.
pub(crate) fn has_stacks(snapshot: &Snapshot) -> bool {
    snapshot.traces.iter().any(|t| t.stacks().iter().any(|s| !s.is_none()))
        || snapshot.segments.iter().any(|s| s.blocks.iter().any(|b| !b.stack.is_none()))
}

/// Snapshots write 0 for a frame without a line.
fn line_number(line: i64) -> Option<u64> {
    u64::try_from(line).ok().filter(|&line| line > 0)
}

/// `transformers` of `…/site-packages/transformers/cache_utils.py`.
fn installed_package(path: &str) -> Option<&str> {
    inside_packages(path).map(|rest| rest.split(['/', '.']).next().unwrap_or(rest))
}

/// What follows the last `site-packages/` or `dist-packages/`.
pub(crate) fn inside_packages(path: &str) -> Option<&str> {
    ["site-packages/", "dist-packages/"]
        .iter()
        .find_map(|folder| path.rfind(folder).map(|at| &path[at + folder.len()..]))
}

/// Gives every file of the snapshot's stacks the shortest ending of its path that no other file has.
fn shorten_all(snapshot: &Snapshot) -> FxHashMap<StringId, String> {
    let mut files: Vec<StringId> = (0..snapshot.stacks.n_frames())
        .filter_map(|i| u32::try_from(i).ok())
        .map(|i| snapshot.stacks.frame(FrameId(i)).filename)
        .collect();
    files.sort_unstable();
    files.dedup();
    let paths: Vec<String> = files.iter().map(|&f| snapshot.strings.get(f).replace('\\', "/")).collect();
    let shortened = shorten(&paths);
    files.into_iter().zip(shortened).collect()
}

fn shorten(paths: &[String]) -> Vec<String> {
    // Installed files keep their package: `transformers/cache_utils.py` is how people know them.
    let ending = |path: &str, parts: usize| -> String {
        if let Some(inside) = inside_packages(path) {
            return inside.to_owned();
        }
        let mut from = path.len();
        for _ in 0..parts {
            from = path[..from].rfind('/').unwrap_or(0);
        }
        path[from..].trim_start_matches('/').to_owned()
    };
    let mut parts = vec![1_usize; paths.len()];
    loop {
        let mut seen: FxHashMap<String, Vec<usize>> = FxHashMap::default();
        for (i, path) in paths.iter().enumerate() {
            seen.entry(ending(path, parts[i])).or_default().push(i);
        }
        let mut changed = false;
        for same in seen.values().filter(|same| same.len() > 1) {
            for &i in same {
                if inside_packages(&paths[i]).is_none() && parts[i] < paths[i].matches('/').count() + 1 {
                    parts[i] += 1;
                    changed = true;
                }
            }
        }
        if !changed {
            return paths.iter().zip(&parts).map(|(p, &n)| ending(p, n)).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn judges_paths() {
        let cases = [
            ("/home/u/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", Origin::Torch),
            ("/usr/lib/python3/dist-packages/torch/optim/adam.py", Origin::Torch),
            ("C:\\Python\\Lib\\site-packages\\torch\\_tensor.py", Origin::Torch),
            ("/home/u/pytorch/torch/nn/functional.py", Origin::Torch),
            ("/home/u/torch/train.py", Origin::User),
            ("/home/u/venv/lib/python3.12/site-packages/transformers/trainer.py", Origin::Library),
            ("/home/u/venv/lib/python3.12/site-packages/torchvision/models/resnet.py", Origin::Library),
            ("/usr/lib/python3.12/contextlib.py", Origin::Runtime),
            ("<frozen runpy>", Origin::Runtime),
            ("<eval_with_key>.3", Origin::Generated),
            ("/tmp/torchinductor_u/ab/cab.py", Origin::Generated),
            ("<stdin>", Origin::User),
            ("<ipython-input-3-abc>", Origin::User),
            ("/tmp/ipykernel_12/345.py", Origin::User),
            ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", Origin::Native),
            ("??", Origin::Native),
            ("train.py", Origin::User),
        ];
        for (path, expected) in cases {
            assert_eq!(Origin::of(path), expected, "{path}");
        }
    }

    #[test]
    fn shortens_until_no_two_files_print_alike() {
        let paths = [
            "/a/model/utils.py",
            "/a/train/utils.py",
            "/a/train/main.py",
            "/v/site-packages/x/y.py",
            "data.py",
        ];
        let short = shorten(&paths.map(str::to_owned));
        assert_eq!(short, ["model/utils.py", "train/utils.py", "main.py", "x/y.py", "data.py"]);
    }
}
