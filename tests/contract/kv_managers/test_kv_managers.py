from runtime_svc.engine.kv.blocks import BlockManager
from runtime_svc.engine.kv.slots import SlotManager
from tests.contract.kv_managers.kv_manager_suite import NUM_REQUESTS, NUM_TOKENS, KvManagerSuite, make_request, reserve


class TestSlotManager(KvManagerSuite):
    def make_kv(self) -> SlotManager:
        return SlotManager(NUM_REQUESTS, NUM_TOKENS)

    def test_lowest_slot_comes_first(self) -> None:
        kv, requests = self.make_kv(), [make_request(name) for name in "abc"]
        assert [reserve(kv, request, 1).blocks for request in requests] == [(0,), (1,), (2,)]
        kv.release(requests[2])
        kv.release(requests[0])
        assert reserve(kv, make_request("d"), 1).blocks == (0,)


class TestBlockManager(KvManagerSuite):
    num_call_shares = NUM_TOKENS // 2

    def make_kv(self) -> BlockManager:
        return BlockManager(NUM_REQUESTS * 2, NUM_TOKENS // 2, caches_prefixes=False)


class TestSharingBlockManager(KvManagerSuite):
    """Most requests of the suite never say that their tokens are computed, so they share nothing."""

    num_call_shares = NUM_TOKENS // 2
    shares_with_all = True

    def make_kv(self) -> BlockManager:
        return BlockManager(NUM_REQUESTS * 2, NUM_TOKENS // 2, caches_prefixes=True)
