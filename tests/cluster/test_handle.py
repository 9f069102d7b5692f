"""Which cluster tests run on: ours, unless both variables name another."""

from pathlib import Path

import pytest
from localcluster.handle import ClusterHandle, foreign_from_environment
from localcluster.steps import ClusterError


def never(seconds: float) -> None:
    raise AssertionError(f"paused for {seconds} s")


def test_a_plain_kubeconfig_is_ignored_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign_from_environment({"KUBECONFIG": "/prod/config"}, pause=never) is None
    assert "KUBECONFIG is ignored" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["KVSCALER_TEST_KUBECONFIG", "KVSCALER_TEST_CONTEXT"])
def test_one_variable_alone_is_an_error(variable: str) -> None:
    with pytest.raises(ClusterError, match="only together"):
        foreign_from_environment({variable: "x"}, pause=never)


def test_both_variables_choose_another_cluster_after_a_pause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = tmp_path / "config"
    kubeconfig.touch()
    variables = {"KVSCALER_TEST_KUBECONFIG": str(kubeconfig), "KVSCALER_TEST_CONTEXT": "staging"}
    paused: list[float] = []
    expected = ClusterHandle(kubeconfig, "staging", None)

    assert foreign_from_environment(variables, pause=paused.append) == expected
    assert paused == [5]
    assert "context staging" in capsys.readouterr().err
    assert foreign_from_environment({**variables, "YES": "1"}, pause=never) == expected


def test_a_kubeconfig_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    variables = {
        "KVSCALER_TEST_KUBECONFIG": str(tmp_path / "none"),
        "KVSCALER_TEST_CONTEXT": "staging",
    }
    with pytest.raises(ClusterError, match="no such file"):
        foreign_from_environment(variables, pause=never)


def test_images_go_only_into_a_cluster_of_ours(tmp_path: Path) -> None:
    foreign = ClusterHandle(tmp_path / "config", "staging", None)
    with pytest.raises(ClusterError, match="staging has no node"):
        foreign.import_image(tmp_path / "image.tar")
