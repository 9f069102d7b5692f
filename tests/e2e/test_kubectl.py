"""What a person sees who has nothing but kubectl."""

import pytest

from tests.e2e.live import Live

pytestmark = pytest.mark.cluster


async def test_explain_tells_what_scaling_is(chat: Live) -> None:
    words = await chat.kubectl("explain", "kvis.spec.scaling")
    assert "KIND:       InferenceService" in words
    for field in ("mode", "minReplicas", "maxReplicas", "scaleDown", "onMissingSignals"):
        assert field in words
    assert "-required-" in words
    window = await chat.kubectl("explain", "kvis.spec.scaling.scaleDown.stabilizationWindow")
    assert "Replicas shrink only to the largest number wanted" in " ".join(window.split())


async def test_get_shows_the_columns_that_matter(chat: Live) -> None:
    heading, row = (await chat.kubectl("get", "kvis", "chat")).splitlines()
    names = heading.split()
    assert names == ["NAME", "READY", "ENGINE", "REPLICAS", "DESIRED", "KV%", "BINDING", "AGE"]
    shown = dict(zip(names, row.split(), strict=True))
    assert (shown["NAME"], shown["READY"], shown["ENGINE"]) == ("chat", "True", "Kvscaler")
    assert (shown["REPLICAS"], shown["DESIRED"]) == ("1", "1")
    wide = (await chat.kubectl("get", "kvis", "chat", "--output=wide")).splitlines()
    assert wide[0].split()[-1] == "REASON"
    assert wide[1].split()[-1] == "ReplicasReady"
