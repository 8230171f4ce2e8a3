"""A format of executables from outside, as another distribution would state it. Imports no torch."""

from targets.target import ExecutableFormat

TOY = ExecutableFormat(
    name="toy",
    media_type="application/vnd.example.toy",
    suffix=".json",
    state_convention="functional",
    is_native=False,
    executor="tests.contract.executors.toy_executor:load_toy_executor",
)
NO_FORMAT = "a string"
