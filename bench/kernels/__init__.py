"""How fast kernels are by dtype, rows and instruction set, beside the library that could serve instead.

    .venv/bin/python -m bench.kernels [--quick] [--only linear|attend]

It writes bench/kernels/linear.json, bench/kernels/attend.json and bench/kernels/RESULTS.md.

The table in `compiler_svc/lower` that says which kernel serves which rows follows from `linear.json`. Kernels are
compiled by themselves with the instructions of each level that this host has, and take turns in processes of one
thread, so that other load of the machine affects all of them alike. Rates are by a thread's processor time.
"""
