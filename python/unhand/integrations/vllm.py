"""vLLM: an engine is shut down through its own calls, in their order, and what stays in this process goes back or is named."""

from unhand import _floor
from unhand._free import Freed

__all__ = ["shutdown"]


def shutdown(llm, *, timeout=None) -> Freed:
    """End the engine of an `LLM`, `LLMEngine` or `AsyncLLM`, and give back what it leaves in this process.

    `del llm` does not: the engine of an `LLM` runs in a process of its own, or, with `VLLM_ENABLE_V1_MULTIPROCESSING=0`, in
    this one, where objects are frozen for the collector and module-level caches have the model. `timeout` is how many
    seconds the engine's processes get to end by themselves. `llm` cannot be used afterwards. Memory that was another
    process's is not in the figures of the answer, which are this one's.

    Written against vLLM 0.24. TypeError for what is no engine.
    """
    engine = getattr(llm, "llm_engine", llm)
    core = getattr(engine, "engine_core", None)
    if core is None or not hasattr(core, "shutdown"):
        raise TypeError(f"not an engine of vLLM: `{type(llm).__name__}`")
    if hasattr(engine, "shutdown"):
        # `AsyncLLM` has more to end than its core.
        engine.shutdown(timeout=timeout)
    else:
        core.shutdown(timeout=timeout)
    # In process: the driver's worker lets go of its model, and the engine still has what refers to it.
    return _floor.release(engine)
