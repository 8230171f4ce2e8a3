"""Who may do what: tokens and certificates name principals, rules say what each method needs of them.

Knows gRPC and the root of the error tree. Services state the rules of their own methods.
"""
