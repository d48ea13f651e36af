"""One function or program in a process of its own, for the fixture `standin`: `python -m unhand._pytest_child JOB.json`."""

import importlib
import importlib.util
import json
import sys
import traceback


def main(path):
    """Do what the file says and leave an answer; the exit code says whether it went well."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    sys.path[:] = job["path"]
    said, code = {}, 0
    try:
        value = _program(job["program"]) if "program" in job else _function(job)(*job["args"])
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"what it returned is no JSON value ({error}): `{type(value).__name__}`") from None
        said = {"value": value}
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        if type(error).__name__ == "Skipped" and hasattr(error, "allow_module_level"):
            said = {"skipped": str(error)}
        else:
            text = "".join(traceback.format_exception(type(error), error, _past_here(error.__traceback__)))
            print(text, end="", file=sys.stderr)
            said, code = {"error": text}, 1
    with open(job["answer"], "w", encoding="utf-8") as file:
        json.dump(said, file)
    return code


def _program(source):
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<program>", "exec"), namespace)
    return namespace.get("result")


def _function(job):
    module = _module(job["module"], job["file"])
    if "source" in job:
        namespace = vars(module)
        exec(compile(job["source"], job["file"], "exec"), namespace)
        return namespace[job["function"]]
    found = module
    for name in job["function"].split("."):
        found = getattr(found, name)
    return found


def _module(name, file):
    """The file as a module, under the name that it has in the other process."""
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) == file:
            return module
    except ImportError as error:
        if error.name not in (name, *(name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _past_here(steps):
    """A traceback from the first step outside of this file."""
    while steps is not None and steps.tb_next is not None and steps.tb_frame.f_code.co_filename == __file__:
        steps = steps.tb_next
    return steps


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
