import asyncio

from runtime_svc.deployments.progress import LoadProgress, LoadStage, ProgressFeed


async def collect(feed: ProgressFeed) -> list[LoadProgress]:
    return [progress async for progress in feed.watch()]


async def test_late_watcher_sees_every_stage_once() -> None:
    feed = ProgressFeed()
    feed.report(LoadStage.FETCH)
    feed.report(LoadStage.FETCH, 5, 10)
    feed.report(LoadStage.FETCH, 10, 10)
    feed.report(LoadStage.MAP)
    feed.close()
    assert await collect(feed) == [LoadProgress(LoadStage.FETCH, 10, 10), LoadProgress(LoadStage.MAP)]
    assert await collect(feed) == await collect(feed)


async def test_watchers_follow_and_see_the_end_of_a_stage() -> None:
    feed = ProgressFeed()
    watchers = [asyncio.create_task(collect(feed)) for _ in range(2)]
    for done in range(4):
        feed.report(LoadStage.FETCH, done, 3)
        await asyncio.sleep(0)
    feed.report(LoadStage.FETCH, 3, 3)
    feed.report(LoadStage.MAP)
    feed.close()
    for watcher in watchers:
        seen = await watcher
        assert seen[-1] == LoadProgress(LoadStage.MAP)
        assert seen[-2] == LoadProgress(LoadStage.FETCH, 3, 3)
        assert len(set(seen)) == len(seen)


async def test_feed_that_ends_without_a_stage() -> None:
    feed = ProgressFeed()
    watcher = asyncio.create_task(collect(feed))
    await asyncio.sleep(0)
    feed.close()
    assert await watcher == []
