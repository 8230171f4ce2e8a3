"""Forkservers: warm processes that have loaded what others need, and fork those.

    forkserver = Forkserver("kiln-forkserver", Call("package.module:load"), environment={...})            client
    child = forkserver.start(Call("package.module:run", (1, "two")), fds=[...], name="kiln-rank-0")
    exit_code = await child.wait()                                                                          child

A service starts a forkserver as a program of its own, or forks it from another one; a process that inherits a
connection to it is a `ForkserverClient`. `server` is what runs in the forkserver, `protocol` what the two say to each
other. Must not know ranks, builds, lowerings or torch: functions go by their names, and only the forked process, or the
forkserver itself, imports them.

A process leads a session of its own. It ends, with its process group, when its owner kills it or ends; when its
forkserver ends; and, because a forkserver dies with its parent, when the service ends.
"""
