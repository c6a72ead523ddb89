"""Random changes of images, against numpy and against the distributions that they are drawn
from."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from nanodnt.data import augment
from nanodnt.data.augment import OPERATIONS, rand_augment
from nanodnt.settings import TrainConfig
from support.images import noise

GRAY, COLOUR = Image.fromarray(noise(20, 30)), Image.fromarray(noise(20, 30, 3))


def generator(seed=0):
    return np.random.default_rng(seed)


def pixels(image):
    return np.asarray(image).astype(int)


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(crop_area=0), "crop_area=0 must be above 0"),
        (dict(label_smoothing=1.0), "label_smoothing=1.0 must be at least 0 and below 1"),
        (dict(rand_augment=10.5), "rand_augment=10.5 must be between 0 and 10"),
        (dict(rand_augment_std=float("inf")), "rand_augment_std=inf"),
        (
            dict(crop_area=0.5, crop_padding=2),
            "two kinds of crops: set crop_area=1 or crop_padding=0",
        ),
    ],
)
def test_values_out_of_range(values, words):
    with pytest.raises(ValueError) as error:
        TrainConfig(**values).check()
    assert words in str(error.value) and "\n" not in str(error.value)


def boxes(monkeypatch, image, least, count):
    """The parts that `count` crops take: (count, 4) left, top, right, bottom."""
    found, rng = [], generator()
    monkeypatch.setattr(Image.Image, "resize", lambda image, size, resample, box: found.append(box))
    for _ in range(count):
        augment.crop(image, 8, least, rng)
    return np.array(found)


def test_crops_have_areas_and_aspects_of_their_distributions(monkeypatch):
    found = boxes(monkeypatch, Image.new("L", (1000, 1000)), 0.1, 4000)
    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    assert found.min() >= 0 and found.max() <= 1000
    area, aspect = width * height / 1e6, np.log(width / height)
    small = area < 0.5  # all of these fit into the image, so none is drawn again
    for values, low, high in (
        (area[small], 0.1, 0.5),
        (aspect[small], -np.log(4 / 3), np.log(4 / 3)),
    ):
        share = np.sort((values - low) / (high - low))
        # Kolmogorov, p = 0.001
        assert np.abs(share - np.linspace(0, 1, len(share))).max() < 1.95 / len(share) ** 0.5
    wide = boxes(monkeypatch, Image.new("L", (90, 9)), 0.9, 1)
    np.testing.assert_allclose(wide, [[39, 0, 51, 9]])  # none fits: the middle


def test_a_crop_is_that_part_resized():
    image = Image.fromarray(np.tile(np.arange(100, dtype=np.uint8)[:, None], 100))
    found = pixels(augment.crop(image, 50, 0.25, generator(3)))
    assert (
        found.shape == (50, 50)
        and (np.diff(found, axis=0) >= 0).all()
        and (found == found[:, :1]).all()
    )
    assert 40 < found[-1, 0] - found[0, 0] < 100


def test_padding_moves_and_brings_in_black():
    image = Image.fromarray(noise(6, 6) // 2 + 100)
    rng = generator()
    flags = TrainConfig(crop_padding=2)
    padded = np.pad(pixels(image), 2)
    moved = {padded[y : y + 6, x : x + 6].tobytes() for y in range(5) for x in range(5)}
    assert {
        pixels(augment.change(image, 6, flags, 0, rng)).tobytes() for _ in range(300)
    } == moved and len(moved) == 25


def test_every_second_image_is_flipped():
    image, rng = Image.fromarray(noise(6, 6, 3)), generator()
    counts = Counter(
        pixels(augment.change(image, 6, TrainConfig(flip=True), 0, rng)).tobytes()
        for _ in range(400)
    )
    assert counts.keys() == {pixels(image).tobytes(), pixels(image)[:, ::-1].tobytes()}
    assert 160 < min(counts.values())  # 4 sigma


@pytest.mark.parametrize("image", [GRAY, COLOUR], ids=["gray", "colour"])
def test_operations_against_numpy(image):
    x = pixels(image)

    def run(name, level, sign=1):
        found = OPERATIONS[name](image, level, sign, 9 if image.mode == "L" else (9, 9, 9))
        assert found.mode == image.mode and found.size == image.size
        return pixels(found)

    assert (run("invert", 0.3) == 255 - x).all()
    assert (run("solarize", 0.5) == np.where(x < 128, x, 255 - x)).all()
    assert (run("solarize_add", 1) == np.where(x < 128, x + 110, x)).all()
    assert (run("posterize", 0.5) == x // 64 * 64).all() and (
        run("posterize", 1) == x // 128 * 128
    ).all()
    low, high = x.min((0, 1)), x.max((0, 1))
    assert np.abs(run("auto_contrast", 0) - (x - low) * 255 / (high - low)).max() <= 1
    assert np.abs(run("brightness", 0.5) - np.minimum(x * 1.45, 255)).max() <= 1
    assert run("contrast", 1, -1).std() == pytest.approx(0.1 * x.std(), rel=0.3)
    assert run("sharpness", 1).std() > x.std() > run("sharpness", 1, -1).std()
    dark = Image.fromarray(noise(60, 60) // 8)
    # of even values
    assert 0.9 < pixels(OPERATIONS["equalize"](dark, 0, 1, 0)).std() / (256 / 12**0.5) < 1.1
    moved = run("shift_x", 1 / 0.45 / 10)  # a tenth of 30 pixels
    assert (moved[:, :26] == x[:, 3:29]).all() and (moved[:, 28:] == 9).all()
    assert (run("shift_y", 1 / 0.45 / 10, -1)[4:] == x[2:18]).all()


def test_colour_only_changes_colours():
    assert (pixels(OPERATIONS["color"](GRAY, 0.9, -1, 0)) == pixels(GRAY)).all()
    gray, wild = (
        pixels(OPERATIONS["color"](COLOUR, 1, sign, 0)).std(-1).mean() for sign in (-1, 1)
    )
    assert gray < 0.2 * pixels(COLOUR).std(-1).mean() < 0.2 * wild


def test_shears_and_rotations():
    ramp = Image.fromarray(np.tile(np.arange(41, dtype=np.uint8) * 5, (41, 1)))
    sheared = pixels(OPERATIONS["shear_x"](ramp, 1, 1, 0))
    slope = np.diff(sheared[5:20, 15]) / 5  # pixels a row
    assert abs(slope.mean() - 0.3) < 0.06
    assert (pixels(OPERATIONS["shear_y"](ramp, 1, 1, 0))[20, 5:30] == pixels(ramp)[20, 5:30]).all()
    rotated = pixels(OPERATIONS["rotate"](ramp, 1, 1, 0))[18:23, 18:23]
    assert np.diff(rotated, axis=1).mean() / 5 == pytest.approx(np.cos(np.pi / 6), abs=0.06)


def test_magnitude_0_changes_nothing_where_a_magnitude_counts():
    same = {
        n
        for n, f in OPERATIONS.items()
        if (pixels(f(COLOUR, 0, 1, (0, 0, 0))) == pixels(COLOUR)).all()
    }
    # change something at any magnitude
    always = {"auto_contrast", "equalize", "invert", "posterize"}
    assert same - always == set(OPERATIONS) - always and "invert" not in same


def test_two_operations_each_with_its_magnitude(monkeypatch):
    seen = []
    for name in OPERATIONS:
        monkeypatch.setitem(
            OPERATIONS, name, lambda image, *rest, name=name: seen.append((name, *rest)) or image
        )
    rng = generator()
    for _ in range(3000):
        assert rand_augment(GRAY, 9, 0.5, 7, rng) is GRAY
    names, levels, signs, _ = zip(*seen, strict=True)
    assert 2850 < len(seen) < 3150  # half of 6,000, 4 sigma
    counts = [names.count(name) for name in OPERATIONS]
    assert len(counts) == 15 and 140 < min(counts) and max(counts) < 260  # 200 each, 4 sigma
    levels = np.array(levels)
    # beyond 2 sigma
    assert levels.max() == 1 and (levels == 1).mean() == pytest.approx(0.0228, abs=0.012)
    assert np.median(levels) == pytest.approx(0.9, abs=0.005) and abs(np.mean(signs)) < 0.08


def draw(settings, count=4000, side=16):
    """The shares of `count` mixed images, zeros into which ones are mixed, and the means of what
    comes out."""
    rng, shares, means = generator(), [], []
    for _ in range(count):
        image = np.zeros((1, side, side), np.float32)
        shares.append(augment.mix_images(image, np.ones_like(image), settings, rng))
        means.append(image.mean())
    return np.array(shares), np.array(means)


def test_mixups_shares_are_of_the_beta_distribution():
    share, mean = draw(TrainConfig(mixup=0.2))
    np.testing.assert_allclose(1 - mean, share, atol=1e-5)
    variance = 1 / (4 * (2 * 0.2 + 1))
    assert abs(share.mean() - 0.5) < 4 * (variance / 4000) ** 0.5
    assert share.var() == pytest.approx(variance, rel=0.12)


def test_cutmixs_share_is_the_area_that_is_left():
    share, mean = draw(TrainConfig(cutmix=1.0))
    np.testing.assert_allclose(1 - mean, share, atol=1e-6)
    assert 0.5 < share.mean() < 0.75  # without the border 1/2; it cuts boxes
    assert (share * 256 == np.round(share * 256)).all()  # whole pixels
    share, _ = draw(TrainConfig(mixup=5.0, cutmix=1.0))  # both: each has every second image
    assert 0.44 < (share * 256 == np.round(share * 256)).mean() < 0.56
