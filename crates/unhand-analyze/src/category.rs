//! What a block is for, told by the frames that allocated it; what they do not tell stays unknown.

use serde::Serialize;

/// What a block is for.
///
/// Every rule reads only what was recorded: the frames of the allocation, the frames of the free, the size
/// of a library workspace. A block that no rule knows is [`Category::Unknown`], never the likeliest guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters and buffers of a module.
    Parameters,
    /// Gradients: allocated in backward, released by `zero_grad`.
    Gradients,
    /// What an optimizer keeps from step to step.
    OptimizerState,
    /// What an optimizer step needs while it runs.
    OptimizerStep,
    /// What the forward pass of a module made.
    Activations,
    /// Made in backward: gradients that nothing released yet, or temporaries.
    Backward,
    /// Batches on their way to the device.
    Inputs,
    /// Buffers of collective communication.
    Communication,
    /// Workspaces of cuBLAS.
    Workspace,
    /// No rule knows.
    Unknown,
}

impl Category {
    /// All categories, in the order of their declaration.
    pub const ALL: [Category; 10] = [
        Category::Parameters,
        Category::Gradients,
        Category::OptimizerState,
        Category::OptimizerStep,
        Category::Activations,
        Category::Backward,
        Category::Inputs,
        Category::Communication,
        Category::Workspace,
        Category::Unknown,
    ];

    /// The words for a sentence.
    pub fn words(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::OptimizerStep => "temporaries of the optimizer step",
            Category::Activations => "activations",
            Category::Backward => "backward (gradients or temporaries)",
            Category::Inputs => "inputs",
            Category::Communication => "communication buffers",
            Category::Workspace => "library workspaces",
            Category::Unknown => "unknown",
        }
    }

    /// One or two words for a column.
    pub fn label(self) -> &'static str {
        match self {
            Category::OptimizerStep => "optimizer step",
            Category::Backward => "backward",
            Category::Communication => "communication",
            Category::Workspace => "workspace",
            other => other.words(),
        }
    }

    /// The category told by `(function, file)` pairs, innermost first. The innermost frame that a rule knows
    /// decides, because it is nearest to the allocation: a forward pass run from an optimizer's closure makes
    /// activations.
    pub fn of_frames<'a>(frames: impl IntoIterator<Item = (&'a str, &'a str)>) -> Category {
        let told = frames.into_iter().find_map(|(function, file)| Category::of_frame(function, file));
        told.unwrap_or(Category::Unknown)
    }

    /// What a single frame tells; `None` when no rule knows it.
    pub fn of_frame(function: &str, file: &str) -> Option<Category> {
        rule(function, file)
    }

    /// The category of a block without a single Python frame.
    ///
    /// Where stacks were recorded, that means a thread that runs no Python: the autograd engine's. It makes
    /// gradients and the temporaries of backward. Without recorded stacks nothing is known.
    pub fn without_frames(has_stacks: bool) -> Category {
        if has_stacks { Category::Backward } else { Category::Unknown }
    }

    /// Corrects the category of one block by what is known of its life.
    ///
    /// * A block made in backward and released inside `zero_grad` was a gradient.
    /// * A block that lives like a library workspace is one ([`LifeHints::is_workspace`]). Parameters and
    ///   optimizer state are kept just so; their frames say what they are.
    #[must_use]
    pub fn refined(self, life: &LifeHints) -> Category {
        match self {
            Category::Activations | Category::Backward | Category::Unknown if life.is_workspace => {
                Category::Workspace
            }
            Category::Backward if life.freed_by_zero_grad => Category::Gradients,
            other => other,
        }
    }
}

/// What is known of one block beside the stack that allocated it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifeHints {
    /// Whether the stack of its free runs through `zero_grad`.
    pub freed_by_zero_grad: bool,
    /// Whether it has the size of a cuBLAS workspace, is the first block of that size from its stack, and the
    /// only one of them never freed. PyTorch makes one per handle and stream, at the first matrix product,
    /// with that product's stack, and keeps it; the one of `cuBLASLt` comes with it.
    pub is_workspace: bool,
}

/// Bytes of the workspaces that PyTorch allocates for cuBLAS: 4096 KiB × 2 + 16 KiB × 8 by default, 32 MiB on
/// Hopper and later.
pub(crate) const CUBLAS_WORKSPACE_SIZES: [u64; 2] = [8_519_680, 33_554_432];

/// Bytes of the workspace for `cuBLASLt`. Too common a size to tell anything by itself.
pub(crate) const CUBLASLT_WORKSPACE_SIZE: u64 = 1 << 20;

/// Whether `bytes` is the size of a workspace that PyTorch allocates for cuBLAS.
pub fn is_cublas_workspace(bytes: u64) -> bool {
    CUBLAS_WORKSPACE_SIZES.contains(&bytes)
}

/// Whether a function is a `zero_grad`, whoever's optimizer or module it belongs to.
pub(crate) fn is_zero_grad(function: &str) -> bool {
    function == "zero_grad" || function.ends_with(".zero_grad")
}

fn rule(function: &str, file: &str) -> Option<Category> {
    let file = file.replace('\\', "/");
    // C++ frames carry the class in front; the last part is the function in both languages.
    let function = function.rsplit("::").next().unwrap_or(function);

    // Optimizers live in a folder that is called so in torch, apex, bitsandbytes and deepspeed alike. State is
    // made once, in a function of its own; everything else inside a step is gone after it.
    let in_optimizer =
        file.split('/').any(|part| part.starts_with("optim")) && !file.ends_with("lr_scheduler.py");
    if in_optimizer {
        return match function {
            "_init_group"
            | "_init_state"
            | "init_state"
            | "init_state_tensor"
            | "get_state_buffer"
            | "_process_value_according_to_param_policy"
            | "load_state_dict" => Some(Category::OptimizerState),
            "step" | "adam" | "adamw" | "sgd" => Some(Category::OptimizerStep),
            f if f.starts_with("_multi_tensor_")
                || f.starts_with("_single_tensor_")
                || f.starts_with("_fused_") =>
            {
                Some(Category::OptimizerStep)
            }
            _ => None,
        };
    }

    // Collectives before modules: a wrapper such as DDP is itself a module.
    if file.contains("torch/distributed/fsdp") && function.contains("unshard") {
        return Some(Category::Parameters);
    }
    if file.contains("torch/nn/parallel/distributed.py") && function != "forward"
        || file.ends_with("torch/distributed/distributed_c10d.py")
    {
        return Some(Category::Communication);
    }

    // `module.to(device)` allocates in `convert`, called by `_apply`; both are methods of Module only.
    if file.ends_with("torch/nn/modules/module.py") {
        match function {
            "convert"
            | "_apply"
            | "to"
            | "cuda"
            | "to_empty"
            | "_load_from_state_dict"
            | "load_state_dict" => {
                return Some(Category::Parameters);
            }
            // The two functions that wrap every call of a module.
            "_call_impl" | "_wrapped_call_impl" => return Some(Category::Activations),
            _ => {}
        }
    }
    if file.contains("torch/nn/modules/") || file.ends_with("torch/nn/parameter.py") {
        match function {
            // Layers made directly on the device.
            "__init__" | "reset_parameters" | "__new__" => return Some(Category::Parameters),
            "forward" => return Some(Category::Activations),
            _ => {}
        }
    }
    match function {
        // How transformers fills a model straight on the device.
        "from_pretrained" | "_load_pretrained_model" | "_load_parameter_into_model" => {
            Some(Category::Parameters)
        }
        // A Function's backward in Python, the engine's entry points, and the second forward of checkpointing.
        "backward" | "_engine_run_backward" | "_make_grads" | "unpack_hook" | "recompute_fn" => {
            Some(Category::Backward)
        }
        // Named like this in accelerate, Lightning, torchtnt and torch's own data code.
        "send_to_device"
        | "move_data_to_device"
        | "batch_to_device"
        | "_batch_to_device"
        | "copy_data_to_device"
        | "transfer_batch_to_device"
        | "to_device" => Some(Category::Inputs),
        _ if file.contains("torch/utils/data/") => Some(Category::Inputs),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: &str = "/v/lib/python3.12/site-packages/torch/";

    fn of(frames: &[(&str, &str)]) -> Category {
        let frames: Vec<(&str, String)> = frames
            .iter()
            .map(|(f, p)| (*f, if p.starts_with('/') { (*p).to_owned() } else { format!("{T}{p}") }))
            .collect();
        Category::of_frames(frames.iter().map(|(f, p)| (*f, p.as_str())))
    }

    #[test]
    fn moving_a_module_makes_parameters() {
        assert_eq!(
            of(&[("convert", "nn/modules/module.py"), ("_apply", "nn/modules/module.py"), ("f", "/t.py")]),
            Category::Parameters
        );
        assert_eq!(of(&[("reset_parameters", "nn/modules/linear.py")]), Category::Parameters);
    }

    #[test]
    fn an_optimizer_makes_state_once_and_temporaries_each_step() {
        assert_eq!(
            of(&[("_init_group", "optim/adam.py"), ("step", "optim/adam.py")]),
            Category::OptimizerState
        );
        assert_eq!(
            of(&[
                ("_multi_tensor_adam", "optim/adam.py"),
                ("adam", "optim/adam.py"),
                ("step", "optim/adam.py")
            ]),
            Category::OptimizerStep
        );
        assert_eq!(of(&[("step", "optim/lr_scheduler.py")]), Category::Unknown);
    }

    #[test]
    fn the_innermost_rule_decides() {
        let closure =
            [("_call_impl", "nn/modules/module.py"), ("closure", "/t.py"), ("step", "optim/lbfgs.py")];
        assert_eq!(of(&closure), Category::Activations);
        let hook = [("step", "optim/sgd.py"), ("hook", "/t.py"), ("backward", "_tensor.py")];
        assert_eq!(of(&hook), Category::OptimizerStep);
    }

    #[test]
    fn a_forward_pass_makes_activations_and_backward_does_not() {
        assert_eq!(
            of(&[("linear", "nn/functional.py"), ("forward", "nn/modules/linear.py")]),
            Category::Activations
        );
        assert_eq!(
            of(&[("_make_grads", "autograd/__init__.py"), ("backward", "_tensor.py")]),
            Category::Backward
        );
    }

    #[test]
    fn a_plain_line_of_the_user_tells_nothing() {
        assert_eq!(of(&[("main", "/home/u/train.py")]), Category::Unknown);
        assert_eq!(Category::without_frames(false), Category::Unknown);
        assert_eq!(Category::without_frames(true), Category::Backward);
    }

    #[test]
    fn batches_and_collectives_are_known_by_name() {
        assert_eq!(
            of(&[("send_to_device", "/v/site-packages/accelerate/utils/operations.py")]),
            Category::Inputs
        );
        assert_eq!(of(&[("all_gather", "distributed/distributed_c10d.py")]), Category::Communication);
    }

    #[test]
    fn the_life_of_a_block_corrects_its_category() {
        let gradient = LifeHints { freed_by_zero_grad: true, ..LifeHints::default() };
        assert_eq!(Category::Backward.refined(&gradient), Category::Gradients);
        let workspace = LifeHints { is_workspace: true, ..LifeHints::default() };
        assert_eq!(Category::Activations.refined(&workspace), Category::Workspace);
        assert_eq!(Category::Activations.refined(&LifeHints::default()), Category::Activations);
        assert_eq!(Category::Parameters.refined(&workspace), Category::Parameters);
    }
}
