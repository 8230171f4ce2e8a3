"""Forkservers: warm processes that have imported what other processes need, and fork those.

    forkserver = Forkserver("kiln-forkserver", Call("package.module:load"), environment={...})            client
    child = forkserver.start(Call("package.module:run", (1, "two")), fds=[...], name="kiln-rank-0")
    exit_code = await child.wait()                                                                          child

A service starts a forkserver as a separate program, or forks it from another one. A process that inherits a connection
to it is a `ForkserverClient`. Must not know ranks, builds, lowerings or torch: requests name functions, and only the
forked process or the forkserver itself imports them.

A process leads a session of its own. It ends when its owner kills it or ends; when its forkserver ends; and, because a
forkserver dies with its parent, when the service ends. What it has started, in whatever session, its forkserver adopts
and ends, even if its parent dies meanwhile. Only a forkserver that dies itself cannot, so a process that starts
programs calls `parent_death.end_tree_with_parent`.
"""
