"""`python/unhand/_native.pyi` says what the built module has: names, parameters, defaults, texts."""

import ast
import inspect

from bench import main
from unhand import _native

STUB = _native.__file__.rpartition("/")[0] + "/_native.pyi"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KINDS = {"posonlyargs": "positional-only", "args": "positional or keyword", "kwonlyargs": "keyword-only"}


def tree():
    with open(STUB, encoding="utf-8") as file:
        return ast.parse(file.read())


def declared(body):
    """The public names that a part of the stub declares, each with its node."""
    names = {}
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = node
    return {name: node for name, node in names.items() if not name.startswith("_")}


def public(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


def parameters_of_stub(node):
    """Name, kind and default of each parameter; the default as text, `...` for one that is not spelled out."""
    arguments = node.args
    found = []
    positional = [(argument, "posonlyargs") for argument in arguments.posonlyargs]
    positional += [(argument, "args") for argument in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for (argument, kind), default in zip(positional, defaults):
        found.append((argument.arg, KINDS[kind], default and ast.unparse(default)))
    if arguments.vararg:
        found.append((arguments.vararg.arg, "variadic positional", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        found.append((argument.arg, KINDS["kwonlyargs"], default and ast.unparse(default)))
    return found


def parameters_of_module(function):
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = None
        if parameter.default is not inspect.Parameter.empty:
            default = "..." if parameter.default is ... else repr(parameter.default)
        found.append((parameter.name, parameter.kind.description, default))
    return found


def compare_functions(name, node, function):
    stub, module = parameters_of_stub(node), parameters_of_module(function)
    # A receiver is positional-only in C, and nobody writes that in a stub.
    if stub and stub[0][0] in ("self", "cls"):
        stub = stub[1:]
        module = module[1:] if module and module[0][0] in ("self", "cls", "$self") else module
    assert [entry[:2] for entry in stub] == [entry[:2] for entry in module], f"{name}: {stub} in the stub, {module} built"
    for (parameter, _, here), (_, _, there) in zip(stub, module):
        same = here == there or (here is not None and there is not None and "..." in (here, there))
        assert same, f"{name}({parameter}): default {here} in the stub, {there} built"


def check_the_same_names():
    stub, module = set(declared(tree().body)), public(_native)
    assert stub == module, f"only in the stub: {stub - module}; only built: {module - stub}"


def check_the_same_parameters():
    for name, node in declared(tree().body).items():
        if isinstance(node, FUNCTIONS):
            compare_functions(name, node, getattr(_native, name))


def check_the_same_classes():
    for name, node in declared(tree().body).items():
        if not isinstance(node, ast.ClassDef):
            continue
        kind = getattr(_native, name)
        stub, module = declared(node.body), public(kind)
        assert set(stub) == module, f"{name}: {sorted(stub)} in the stub, {sorted(module)} built"
        for method, inner in stub.items():
            is_property = any(getattr(word, "id", "") == "property" for word in getattr(inner, "decorator_list", []))
            if isinstance(inner, FUNCTIONS) and not is_property:
                compare_functions(f"{name}.{method}", inner, getattr(kind, method))


def check_every_function_says_what_it_does():
    for name in public(_native):
        assert (getattr(_native, name).__doc__ or "").strip(), f"{name} has no docstring"


def check_everything_in_the_stub_has_a_type():
    for name, node in declared(tree().body).items():
        if isinstance(node, FUNCTIONS):
            everything = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [argument.arg for argument in everything if argument.annotation is None]
            assert not untyped and node.returns is not None, f"{name}: no type for {untyped or 'the result'}"


if __name__ == "__main__":
    main(globals())
