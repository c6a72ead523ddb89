"""Images as a function of the step: the digits, batches by threads and processes, mixing,
validation, refusals."""

import numpy as np
import pytest

from layers import cores
from layers.cores import own_cores
from nanodnt.data.images import PreparedImages
from nanodnt.settings import TrainConfig
from support.images import encode, noise, write_dataset
from support.prepared import load_script

ALL = TrainConfig(crop_area=0.3, flip=True, rand_augment=9, mixup=0.8, cutmix=1.0)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The prepared digits."""
    out = tmp_path_factory.mktemp("data") / "digits"
    load_script("digits").main([f"--out_dir={out}"])
    return str(out)


@pytest.fixture(scope="module")
def colour(tmp_path_factory):
    """23 images of 12 × 12 to train on, of which the first 7 validate."""
    images = [encode(noise(12, 12, 3, seed=i)) for i in range(23)]
    return write_dataset(
        tmp_path_factory.mktemp("data") / "colour", images, images[:7], image_size=12, channels=3
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images of several sizes, kinds and modes."""
    shapes = [(30, 40, 3), (40, 30), (24, 24, 3), (57, 23, 4), (9, 31)]
    train = [encode(noise(*shape, seed=i)) for i, shape in enumerate(shapes)]
    ramp = np.add.outer(np.arange(60), np.arange(80))
    val = [encode(ramp), encode(np.stack([ramp] * 3, -1), "JPEG"), encode(ramp.T)]
    folder = tmp_path_factory.mktemp("data") / "photos"
    return write_dataset(folder, train, val, image_size=None, channels=3)


def opened(name, config=None, size=12, **settings):
    return PreparedImages(name, 9, image_size=size, config=config, **settings)


def epoch(data, batch_size=8):
    """All batches of the first epoch as one."""
    steps = range(-(-data.n_train // batch_size))
    parts = zip(*(data.batch(step, batch_size) for step in steps), strict=True)
    return [np.concatenate(part)[: data.n_train] for part in parts]


def rounded(image):
    return image.round(2).tobytes()


def test_digits_are_those_of_scikit_learn(digits):
    from sklearn.datasets import load_digits

    expected, data = load_digits(), PreparedImages(digits, 16, image_size=8)
    held_out = np.arange(1797) % 5 == 0
    assert (data.n_train, data.n_val, data.meta["classes"]) == (
        1437,
        360,
        [str(i) for i in range(10)],
    )
    pixels = expected.images * 15 / 255
    mean, std = pixels[~held_out].mean(), pixels[~held_out].std()
    assert data.meta["mean"] == [round(mean, 6)] and data.meta["std"] == [round(std, 6)]
    reference = ((pixels - mean) / std).astype(np.float32)[:, None]
    images, labels = data.val_batch(data.validation(), 360)
    np.testing.assert_allclose(images, reference[held_out], atol=1e-5)
    assert (labels == expected.target[held_out]).all()
    images, labels = epoch(data, 64)
    wanted = zip(
        map(rounded, reference[~held_out]), expected.target[~held_out].tolist(), strict=True
    )
    assert sorted(zip(map(rounded, images), labels.tolist(), strict=True)) == sorted(wanted)
    assert "1,437 images an epoch, of 10 classes" in data.describe()


def test_an_epoch_is_every_image_once_and_the_next_has_another_order(colour):
    data = opened(colour)
    images, labels = epoch(data, 1)
    reference = np.stack([noise(12, 12, 3, seed=i) for i in range(23)]).transpose(0, 3, 1, 2) / 255
    reference = (reference - np.reshape([0.25, 0.5, 0.75], (3, 1, 1))) / np.reshape(
        [0.5, 0.25, 0.125], (3, 1, 1)
    )
    place = [np.abs(reference - image).max((1, 2, 3)).argmin() for image in images]
    assert sorted(place) == list(range(23)) and place != list(range(23))
    np.testing.assert_allclose(images, reference[place], atol=1e-5)
    assert (
        images.dtype == np.float32
        and labels.dtype == np.int64
        and labels.tolist() == [i % 4 for i in place]
    )
    second = data.batch(1, 23)[0]
    assert sorted(map(rounded, second)) == sorted(map(rounded, images)) and (second != images).any()


@pytest.mark.parametrize("augment", [None, ALL], ids=["plain", "all"])
def test_a_batch_is_the_same_for_any_workers_and_any_slices(colour, augment):
    data = [opened(colour, augment, workers=n) for n in (1, 2, 5)]
    for step in (7, 0, 7, 123_456_789_012):
        whole = data[0].batch(step, 10)
        for other in data[1:]:
            other.batch(step + 1, 4)  # with anything in between
            assert all((a == b).all() for a, b in zip(whole, other.batch(step, 10), strict=True))
        for n in (1, 2, 5):  # rows that do not begin at even indices: neighbours in another slice
            split = [data[1].batch(step, 10, slice(i, i + n)) for i in range(0, 10, n)]
            for part, parts in zip(whole, zip(*split, strict=True), strict=True):
                assert (part == np.concatenate(parts)).all()


def test_an_offset_moves_a_batch_by_so_many_images(colour):
    data = opened(colour, TrainConfig(mixup=1))
    in_order = opened(colour).batch(0, 21)[1]
    labels = data.batch(3, 4, slice(1, 4), offset=5)[1]
    assert labels.tolist() == in_order[18:].tolist()


def test_a_batch_depends_on_seed_and_step(colour):
    a, b = (opened(colour, ALL, seed=seed) for seed in (1, 2))
    assert (a.batch(0, 8)[0] != b.batch(0, 8)[0]).any() and (
        a.batch(0, 8)[3] != a.batch(1, 8)[3]
    ).all()
    share = opened(colour, TrainConfig(mixup=1)).batch(0, 23)[3]
    assert len(set(share.tolist())) == 23  # each index draws for itself


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    alone = own_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # left in a shell: no group, no sharing
    assert own_cores() == alone
    for processes in (2, 10_000):
        monkeypatch.setattr(cores, "processes_here", processes)
        assert own_cores() == max(1, alone // processes)


def test_mixup_is_a_weighted_mean_of_neighbours(colour):
    plain, labels = opened(colour).batch(3, 7)
    images, own, other, share = opened(colour, TrainConfig(mixup=0.8)).batch(3, 7)
    neighbour = [1, 0, 3, 2, 5, 4, 6]
    assert share.dtype == np.float32 and share[6] == 1 and ((share[:6] > 0) & (share[:6] < 1)).all()
    assert (own == labels).all() and (other == labels[neighbour]).all()
    weight = share[:, None, None, None]
    np.testing.assert_allclose(images, weight * plain + (1 - weight) * plain[neighbour], atol=1e-5)


def test_cutmix_puts_a_box_of_the_neighbour(colour):
    plain, labels = opened(colour).batch(3, 23)
    images, own, other, share = opened(colour, TrainConfig(cutmix=1.0)).batch(3, 23)
    neighbour = [i ^ 1 for i in range(22)] + [22]
    assert (own == labels).all() and (other == labels[neighbour]).all()
    for i in range(23):
        kept, pasted = ((images[i] == source[i]).all(0) for source in (plain, plain[neighbour]))
        assert (kept | pasted).all() and kept.mean() == pytest.approx(share[i])
        rows, columns = np.nonzero(~kept)
        if len(rows):  # a box
            assert (np.ptp(rows) + 1) * (np.ptp(columns) + 1) == len(rows)


def test_validation_is_never_augmented_and_padded_to_one_shape(colour):
    plain, augmented = (opened(colour, a) for a in (None, ALL))
    assert plain.validation().tolist() == list(range(7)) and plain.validation(1).tolist() == [0]
    chosen = plain.validation(40)
    images, labels = plain.val_batch(chosen, 6)
    assert (
        images.shape == (6, 3, 12, 12)
        and labels.tolist() == [0, 1, 3, 1, -1, -1]
        and not images[4:].any()
    )
    for part, expected in zip(
        augmented.val_batch(chosen, 6), (images, labels, labels, np.ones(6)), strict=True
    ):
        assert (part == expected).all()
    assert augmented.val_batch(chosen[:0], 3)[1].tolist() == [-1] * 3


def test_images_of_several_sizes_are_cut_in_the_middle(photos):
    data = opened(photos, size=28)
    images, _ = data.val_batch(data.validation(), 3)
    # 28 / 0.875 = 32 pixels for the shorter side; the ramp rises by 1 a pixel in both directions
    scale = 60 / 32
    places = scale * (np.arange(28) - 13.5)
    middle = np.add.outer(places + 29.5, places + 39.5)
    for image in (images[0], images[1], images[2].transpose(0, 2, 1)):
        values = 255 * (
            image * np.reshape([0.5, 0.25, 0.125], (3, 1, 1))
            + np.reshape([0.25, 0.5, 0.75], (3, 1, 1))
        )
        assert np.abs(values - middle).max() < 4  # JPEG adds 1 or 2


def test_images_of_every_mode_become_those_of_the_dataset(photos):
    images = opened(photos, ALL, 16).batch(0, 5)[0]
    assert images.shape == (5, 3, 16, 16) and np.isfinite(images).all() and images.std() > 0.1


def test_crops_that_do_not_fit_the_images(colour):
    with pytest.raises(ValueError, match="crop_padding=12 must be below image_size=12$"):
        opened(colour, TrainConfig(crop_padding=12))
