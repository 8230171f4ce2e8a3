"""The generated stubs of Kiln's API.

A regular package, and no namespace: a directory named `kiln` beside a script would be a part of the namespace, and with
some installations all of it.
"""
