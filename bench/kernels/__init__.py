"""How fast kernels are by dtype, rows and instruction set, beside the library that could serve instead.

`python -m bench.kernels [--quick] [--only linear|attend]` writes linear.json, attend.json and RESULTS.md here. Which
dtypes the kernel in `compiler_svc/lower` serves follows from `linear.json`. Kernels are compiled
by themselves with the instructions of each level that this host has, and take turns in processes of one thread, so that
other load of the machine affects all of them alike. Rates are by a thread's processor time.
"""
