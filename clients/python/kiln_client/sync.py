"""The blocking clients. Methods have the arguments, results and errors of the asynchronous methods.

Progress callbacks run on a background thread and must not call a blocking client.
"""

from __future__ import annotations

from kiln_client.blocking import BlockingClient, blocking, streaming
from kiln_client.bundles import AsyncBundles
from kiln_client.compiler import AsyncCompiler
from kiln_client.runtime import AsyncRuntime


class Compiler(BlockingClient[AsyncCompiler]):
    """Compiles bundles; see AsyncCompiler."""

    asynchronous = AsyncCompiler

    start_compile = blocking(AsyncCompiler.start_compile)
    plan_compile = blocking(AsyncCompiler.plan_compile)
    start_shard_weights = blocking(AsyncCompiler.start_shard_weights)
    start_shard_adapter = blocking(AsyncCompiler.start_shard_adapter)
    start_quantize_weights = blocking(AsyncCompiler.start_quantize_weights)
    watch_compile = streaming(AsyncCompiler.watch_compile)
    wait_compile = blocking(AsyncCompiler.wait_compile)
    wait_operation = blocking(AsyncCompiler.wait_operation)
    compile = blocking(AsyncCompiler.compile)
    shard_weights = blocking(AsyncCompiler.shard_weights)
    shard_adapter = blocking(AsyncCompiler.shard_adapter)
    quantize_weights = blocking(AsyncCompiler.quantize_weights)
    get_operation = blocking(AsyncCompiler.get_operation)
    list_operations = blocking(AsyncCompiler.list_operations)
    cancel_operation = blocking(AsyncCompiler.cancel_operation)


class Bundles(BlockingClient[AsyncBundles]):
    """Lists, reads, changes and imports bundles, their versions and aliases; see AsyncBundles."""

    asynchronous = AsyncBundles

    get_bundle = blocking(AsyncBundles.get_bundle)
    list_bundles = blocking(AsyncBundles.list_bundles)
    delete_bundle = blocking(AsyncBundles.delete_bundle)
    set_owner = blocking(AsyncBundles.set_owner)
    read_blob = streaming(AsyncBundles.read_blob)
    read_file = blocking(AsyncBundles.read_file)
    set_alias = blocking(AsyncBundles.set_alias)
    delete_alias = blocking(AsyncBundles.delete_alias)
    list_aliases = blocking(AsyncBundles.list_aliases)
    lease_bundle = blocking(AsyncBundles.lease_bundle)
    release_lease = blocking(AsyncBundles.release_lease)
    list_leases = blocking(AsyncBundles.list_leases)
    collect_garbage = blocking(AsyncBundles.collect_garbage)
    import_bundle = blocking(AsyncBundles.import_bundle)


class Runtime(BlockingClient[AsyncRuntime]):
    """Manages deployments and generates with them; see AsyncRuntime."""

    asynchronous = AsyncRuntime

    generate = streaming(AsyncRuntime.generate)
    complete = blocking(AsyncRuntime.complete)
    complete_sequences = blocking(AsyncRuntime.complete_sequences)
    abort = blocking(AsyncRuntime.abort)
    embed = blocking(AsyncRuntime.embed)
    tokenize = blocking(AsyncRuntime.tokenize)
    detokenize = blocking(AsyncRuntime.detokenize)
    load_bundle = blocking(AsyncRuntime.load_bundle)
    unload_bundle = blocking(AsyncRuntime.unload_bundle)
    load_weights = blocking(AsyncRuntime.load_weights)
    load_adapter = blocking(AsyncRuntime.load_adapter)
    unload_adapter = blocking(AsyncRuntime.unload_adapter)
    list_adapters = blocking(AsyncRuntime.list_adapters)
    reset_kv_cache = blocking(AsyncRuntime.reset_kv_cache)
    list_sessions = blocking(AsyncRuntime.list_sessions)
    list_deployments = blocking(AsyncRuntime.list_deployments)
    get_deployment = blocking(AsyncRuntime.get_deployment)
    get_server_info = blocking(AsyncRuntime.get_server_info)
