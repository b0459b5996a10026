"""Reading what the source says about fields: the string below a field, which Python itself throws away."""

import ast
import inspect
import sys
from functools import cache

__all__ = ["attribute_docs", "class_doc"]


def class_doc(described: type) -> str:
    """Return a class's docstring, as paragraphs of one line each, up to its first section such as ``Parameters``."""
    documented = inspect.cleandoc(described.__doc__ or "").partition("\n\nParameters\n")[0]
    return "\n\n".join(_as_markdown(paragraph) for paragraph in documented.split("\n\n"))


def attribute_docs(described: type) -> dict[str, str]:
    """Return what the string below each field of a class says, as one line of Markdown: of the class's own fields."""
    return _docs_of_module(described.__module__).get(described.__name__, {})


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _docs_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_of(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = _as_markdown(inspect.cleandoc(text))
    return found


def _as_markdown(text: str) -> str:
    return " ".join(text.replace("``None``", "`null`").replace("``", "`").split())
