"""`python -m compiler_svc.lower.neuron JOB`: answers a request, in the interpreter with Neuron's packages. A named
error is an answer; any other error ends the process with a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name

from bundle.errors import KilnError
from compiler_svc.lower.neuron.graph_tracer import check_submodel
from compiler_svc.lower.neuron.request import (
    CheckedGraph,
    CompileSubmodel,
    GraphRequest,
    NeuronExecutable,
    NeuronRequest,
    find_front_end,
    read_request,
    write_answer,
)
from execution.failure import Failure


def main(directory: Path) -> None:
    """Answers the request in a directory."""
    request = read_request(directory)
    try:
        write_answer(_answer(request), directory)
    except KilnError as error:
        write_answer(Failure.of(error), directory)


def _answer(request: GraphRequest) -> NeuronExecutable | CheckedGraph:
    if not isinstance(request, NeuronRequest):
        return check_submodel(request)
    compile_submodel: CompileSubmodel = resolve_name(find_front_end(request.front_end))
    return compile_submodel(request)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
