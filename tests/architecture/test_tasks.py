"""No task ends unseen: what a service's code creates is awaited, reports its failure, or is supervised.

The outcome of a task is seen if the function that creates it, or the class if an attribute of `self` has it,

- awaits it, alone or inside of `shield`, `gather` or the like, but for `asyncio.wait`, which keeps errors to itself,
  and for an await in `close`, which comes too late;
- asks for its `result()` or `exception()`;
- or adds a callback that does so, such as `report_failure`.

`begin_task` and `Supervisor.supervise` create tasks that are seen to, so only their module creates any otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import SERVING
from tests.repository import ROOT

CREATE = {"create_task", "ensure_future", "Task"}
ASK = {"result", "exception"}
TOO_LATE = {"close", "stop", "__aexit__"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def name_call(node: ast.AST) -> str:
    """What a call calls, without what it is a member of; empty for another node."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class Source:
    """A source file, and which of its tasks end unseen."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def list_unseen(self) -> list[int]:
        """The lines that create a task whose outcome no code sees."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and name_call(node) in CREATE)
        return sorted(call.lineno for call in calls if not self.is_of_group(call) and not self.is_seen(call))

    def list_around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def is_of_group(self, call: ast.Call) -> bool:
        """Whether a TaskGroup creates the task, whose end awaits it."""
        group = ast.unparse(call.func).rpartition(".")[0]
        items = [item for node in self.list_around(call) if isinstance(node, ast.AsyncWith) for item in node.items]
        groups = [item.optional_vars for item in items if name_call(item.context_expr) == "TaskGroup"]
        return any(name is not None and ast.unparse(name) == group for name in groups)

    def is_seen(self, call: ast.Call) -> bool:
        for node in self.list_around(call):
            match node:
                case ast.Await(value=waited) if name_call(waited) != "wait":
                    return True
                case ast.Assign(targets=targets):
                    return any(self.is_name_seen(target, call) for target in targets)
                case ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
                    return self.is_name_seen(target, call)
                case ast.stmt():
                    return False
        return False

    def is_name_seen(self, target: ast.expr, call: ast.Call) -> bool:
        name = ast.unparse(target)
        kinds = ast.ClassDef if name.startswith("self.") else FUNCTIONS
        scope = next((node for node in self.list_around(call) if isinstance(node, kinds)), self.tree)
        return any(self.sees(node, name) for node in ast.walk(scope))

    def sees(self, node: ast.AST, name: str) -> bool:
        match node:
            case ast.Await(value=waited) if name_call(waited) != "wait" and not self.is_too_late(node):
                return any(isinstance(part, ast.expr) and ast.unparse(part) == name for part in ast.walk(waited))
            case ast.Call(func=ast.Attribute(value=asked, attr=attr)) if ast.unparse(asked) == name:
                return attr in ASK or (attr == "add_done_callback" and self.is_asking(node.args[0]))
        return False

    def is_too_late(self, node: ast.AST) -> bool:
        return any(getattr(one, "name", "") in TOO_LATE for one in self.list_around(node))

    def is_asking(self, callback: ast.expr) -> bool:
        """Whether a callback asks a task for its outcome."""
        name = ast.unparse(callback).removeprefix("self.")
        defined = [node for node in ast.walk(self.tree) if getattr(node, "name", "") == name]
        asks = (name_call(node) in ASK for one in (callback, *defined) for node in ast.walk(one))
        return name == "report_failure" or any(asks)


@pytest.mark.parametrize("package", SERVING)
def test_no_task_of_a_service_ends_unseen(package: str) -> None:
    paths = [path for path in sorted((ROOT / package).rglob("*.py")) if path != ROOT / "edge/supervision.py"]
    assert paths
    unseen = {str(path.relative_to(ROOT)): Source(path.read_text()).list_unseen() for path in paths}
    assert not {path: lines for path, lines in unseen.items() if lines}


UNSEEN = """
class Keeper:
    def forget_at_once(self):
        asyncio.create_task(self.run())

    def keep(self):
        self.kept = asyncio.create_task(self.run())

    def give_away(self):
        return asyncio.create_task(self.run())

    def collect(self):
        self.tasks.add(asyncio.ensure_future(self.run()))

    def drop(self):
        task = asyncio.Task(self.run())
        task.add_done_callback(self.drop_end)

    def drop_end(self, task):
        self.tasks.discard(task)

    async def only_wait(self):
        task = loop.create_task(self.run())
        await asyncio.wait([task])

    def start(self):
        task = asyncio.create_task(self.run())

    async def await_another(self, task):
        await task

class Other:
    async def join(self):
        await self.kept

    def keep_until_the_end(self):
        self.ended = asyncio.create_task(self.run())

    async def close(self):
        await self.ended
"""

SEEN = """
class Keeper:
    async def await_at_once(self):
        await asyncio.create_task(self.run())

    async def await_later(self):
        task = asyncio.create_task(self.run())
        await asyncio.shield(task)

    async def gather(self):
        tasks = [asyncio.create_task(run()) for run in self.all]
        await asyncio.gather(*tasks)

    async def group(self):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run())

    def keep(self):
        self.kept = asyncio.create_task(self.run())

    async def join(self):
        await self.kept

    def report(self):
        task = self.reported = asyncio.create_task(self.run())
        task.add_done_callback(report_failure)

    def look(self):
        task = asyncio.create_task(self.run())
        task.add_done_callback(self.look_at)

    def look_at(self, task):
        self.error = task.exception()
"""


def test_what_is_not_seen_is_found() -> None:
    lines = UNSEEN.splitlines()
    creating = [number for number, line in enumerate(lines, start=1) if any(f"{one}(" in line for one in CREATE)]
    assert Source(UNSEEN).list_unseen() == creating
    assert not Source(SEEN).list_unseen()
