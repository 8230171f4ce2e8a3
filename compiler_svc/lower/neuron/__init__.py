"""Lowers submodels to NEFFs, in an interpreter of their own: Neuron's packages need another torch than this compiler.

    lower_submodel(job)                      interpreter: in a lowering process; starts the interpreter and waits
    python -m compiler_svc.lower.neuron JOB  __main__: in the interpreter; runs the front end that the job names
    compile_submodel(request)                model_builder: a front end, which calls ModelBuilder's units

    check_graph(request)                     interpreter: in a planning process; starts the interpreter and waits
    check_submodel(request)                  graph_tracer: in the interpreter; has torch-xla trace a submodel, checks it

    xla_runner(directory)                    xla_runner: in a build; starts the interpreter to run submodels on the CPU
    python -m compiler_svc.lower.neuron.xla_process FD  xla_process: in the interpreter; has torch-xla run them

`flags` says what neuronx-cc is called with. `hlo` reads graphs, and `hlo_check` refuses those that neuronx-cc would
refuse, before it is called. Only functions of front ends, of `graph_tracer`, of `xla_model` and of `lower.xla` import
Neuron's packages.
"""
