"""Settings from YAML files, presets and the command line; those that cannot work are refused by name and value."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.published import PUBLISHED
from fastsync.ppo.cli import Arguments, Launch, parse, say_which_settings
from fastsync.ppo.ppo import Settings
from fastsync.ppo.settings import PRESETS, dump_settings, load_settings, preset_names
from tests.refused import refused


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text)
    return str(file)


def test_every_setting_can_be_written_and_read_back(tmp_path: Path):
    # No value is the default, so that none can be lost without notice.
    settings = Settings(
        env="a:b", seed=2, total_steps=7, num_envs=6, num_steps=6, vectorization="async",
        network="shared", recurrent="gru", action_distribution="tanh_normal",
        hidden_sizes=(3, 2, 1), activation="elu", log_std_init=-1.5,
        ortho_init=False,
        learning_rate=1e-5, lr_schedule="adaptive", lr_scaling="sqrt", warmup_updates=3, num_epochs=2,
        num_minibatches=3, num_micro_batches=2, gamma=0.5, gae_lambda=0.25, clip_coef=1e-10, anneal_clip=True,
        clip_value_loss=False, norm_advantages="none", norm_observations=True, norm_rewards=True, ent_coef=0.0,
        vf_coef=1.0, max_grad_norm=float("inf"), target_kl=1e20, compression="fp16",
        device="cpu", precision="bf16", timeout=5.0, runs_dir="no", run_name="007", checkpoint_interval=0.5,
        keep_checkpoints=1, resume="null", wandb_project="on", policy="c:D", log_info=("x", "y"), fused=False,
        sync="diloco", sync_every=3, env_kwargs={"a": [1, {"b": None}], "c": True, "d": "x y"},
        quiet=True, eval_interval=9, eval_episodes=4, eval_env="d:e",
        loss="f:g", advantages="h.py:i", allow_other_loss=True,
    )  # fmt: skip
    same = [
        field.name for field in fields(Settings) if getattr(settings, field.name) == getattr(Settings(), field.name)
    ]
    assert same == ["micro_batches", "critic_keys", "bucket_cap_mb", "on_lost_rank"]
    continues = replace(  # not with diloco, and what is hidden from the actor not with layers that it shares
        settings, sync="gradients", sync_every=1, bucket_cap_mb=0.5, on_lost_rank="continue",
        network="separate", recurrent="none", critic_keys=("state", "more"),
    )  # fmt: skip
    for each in (settings, continues):
        assert load_settings(write(tmp_path, dump_settings(each)), Settings) == each


def test_the_flag_that_norm_advantages_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for flag, scope in (("true", "rollout"), ("false", "none")):
        assert load_settings(write(tmp_path, f"norm_advantages: {flag}"), Settings).norm_advantages == scope
        assert replace(Settings(), norm_advantages=flag == "true").norm_advantages == scope
    with pytest.raises(SystemExit):
        parse(Launch, "fastsync train", ["--no-norm-advantages"])
    assert "write --norm-advantages none" in capsys.readouterr().err
    with pytest.raises(ValueError, match="norm_advantages=batch must be one of minibatch, rollout, none"):
        Settings(norm_advantages="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "--learning-rate"),
        ("num_envs: 1.5", "--num-envs: expected a whole number, such as 1000000, 1_000_000 or 1e6, got '1.5'"),
        ("total_steps: .inf", "--total-steps: expected a whole number, such as 1000000, 1_000_000 or 1e6, got 'inf'"),
        ("num_envs: 0", "num_envs=0 must be at least 1"),
        ("bucket_cap_mb: 0", "bucket_cap_mb=0.0 must be a finite number greater than 0"),
        ("env_kwargs: [1]", "--env-kwargs: expected a JSON object, such as '{\"continuous\": true}', got '1'"),
        ("- seed", "must hold lines such as 'total_steps: 100000', not a list"),
        ("seed: !!python/object/apply:os.getcwd []", "is not YAML: "),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises((SystemExit, ValueError)) as error:
        load_settings(write(tmp_path, text), Settings)
    assert message in str(error.value) + " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("million", ["1e6", "1.0e+6", "1_000_000", "1000000", "1.E6", "'1e6'"])
def test_whole_numbers_are_as_people_write_them(tmp_path: Path, million: str):
    """YAML takes some of these for text, and some for a float."""
    many = {"total_steps": 1_000_000, "seed": 1_000_000, "hidden_sizes": (1_000_000, 64)}
    text = f"total_steps: {million}\nseed: {million}\nhidden_sizes: [{million}, 64]\n"
    assert load_settings(write(tmp_path, text), Settings) == Settings(**many)
    word = million.strip("'")
    words = ["--total-steps", word, "--seed", word, "--hidden-sizes", word, "64", "--nproc", "1e1"]
    launch = parse(Launch, "test", words)
    assert launch.settings == Settings(**many)
    assert launch.nproc == 10


def test_arguments_of_the_environment_are_json_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    words = ["--env-kwargs", '{"continuous": true, "gravity": -9.5}']
    assert parse(Launch, "test", words).settings.env_kwargs == {"continuous": True, "gravity": -9.5}
    with pytest.raises(SystemExit):
        parse(Launch, "test", ["--env-kwargs", "continuous=True"])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--env-kwargs: expected a JSON object, such as '{\"continuous\": true}', got 'continuous=True'" in said


def test_a_large_whole_number_loses_nothing():
    assert parse(Launch, "test", ["--seed", "9007199254740993.0"]).settings.seed == 2**53 + 1


def test_what_is_neither_file_nor_preset_is_refused():
    said = r"config='cartpole' is neither a file nor a preset; did you mean CartPole-v1\?; presets: Acrobot-v1, "
    with pytest.raises(ValueError, match=said):
        load_settings("cartpole", Settings)
    refused(lambda: load_settings("../presets/Atari", Settings), "/presets/Atari' is neither a file nor a preset")


def test_presets_are_whole_and_say_where_they_are_from():
    assert {"CartPole-v1", "HalfCheetah-v5", "LunarLander-v3", "Atari"} <= set(preset_names())
    for name in preset_names():
        assert load_settings(name, Settings).env == ("ALE/Breakout-v5" if name == "Atari" else name)
        assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("name", preset_names())
def test_ranks_share_the_batch_of_a_preset(name: str):
    whole = load_settings(name, Settings)
    rows = whole.num_envs * whole.num_steps
    for num_ranks in (2, 3, 16):
        each = load_settings(name, Settings, num_ranks)
        assert each.num_minibatches == whole.num_minibatches
        more = num_ranks * each.num_envs * each.num_steps - rows
        assert 0 <= more < num_ranks * max(each.num_minibatches, each.num_steps)
        assert more == 0 or num_ranks != 2


def test_the_command_line_tells_how_many_ranks_share_a_preset(monkeypatch: pytest.MonkeyPatch):
    words = ["--config", "CartPole-v1"]
    assert parse(Launch, "fastsync train", words).settings.num_envs == 8
    assert parse(Launch, "fastsync train", [*words, "--nproc", "4"]).settings.num_envs == 2
    assert parse(Launch, "fastsync train", [*words, "--nproc", "4", "--num-envs", "8"]).settings.num_envs == 8
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert parse(Arguments, "python -m fastsync.ppo", words).settings.num_envs == 4


@pytest.mark.parametrize("env", PUBLISHED["zoo"])
def test_presets_that_name_the_zoo_are_the_zoos(env: str):
    zoo = PUBLISHED["zoo"][env]
    preset = load_settings(env, Settings)
    assert preset.vf_coef == 2 * zoo.value_coef  # of half the squared error
    assert (preset.lr_schedule == "linear") == zoo.anneal_lr
    assert (preset.norm_observations, preset.norm_rewards) == (zoo.normalize, zoo.normalize)
    same = ("total_steps", "num_envs", "num_steps", "num_minibatches", "num_epochs", "learning_rate", "gamma")
    for name in (*same, "gae_lambda", "anneal_clip", "clip_value_loss", "norm_advantages"):
        assert getattr(preset, name) == getattr(zoo, name), name
    assert (preset.clip_coef, preset.ent_coef) == (zoo.clip, zoo.entropy)


@pytest.mark.parametrize(
    ("env", "batch_size", "value_coef", "others"),
    [
        ("HalfCheetah-v5", 64, 0.58096, (20, 2.0633e-05, 0.98, 0.92, 0.1, 0.000401762, 0.8)),
        ("Hopper-v5", 32, 0.835671, (5, 9.80828e-05, 0.999, 0.99, 0.2, 0.00229519, 0.7)),
    ],
)
def test_presets_of_mujoco_are_the_zoos(env: str, batch_size: int, value_coef: float, others: tuple[float, ...]):
    """As in its hyperparams/ppo.yml, for v3."""
    preset = load_settings(env, Settings)
    names = ("num_epochs", "learning_rate", "gamma", "gae_lambda", "clip_coef", "ent_coef", "max_grad_norm")
    assert tuple(getattr(preset, name) for name in names) == others
    assert (preset.num_envs, preset.num_steps, preset.num_minibatches) == (1, 512, 512 // batch_size)
    assert preset.vf_coef == pytest.approx(2 * value_coef, rel=1e-12)  # of half the squared error
    assert preset == replace(
        preset, total_steps=1_000_000, norm_observations=True, norm_rewards=True, hidden_sizes=(256, 256),
        activation="relu", log_std_init=-2.0, ortho_init=False, lr_schedule="constant", clip_value_loss=False,
    )  # fmt: skip


def test_a_training_says_which_settings_it_has_if_nobody_has_chosen(capsys: pytest.CaptureFixture[str]):
    say_which_settings("fastsync train", None, Settings())
    assert "CleanRL's general ones, of its ppo.py, on each rank; --config CartPole-v1 has" in capsys.readouterr().err
    say_which_settings("fastsync train", "CartPole-v1", Settings())
    say_which_settings("fastsync train", None, Settings(quiet=True))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [Launch, Arguments])
def test_the_command_line_wins_over_the_file(tmp_path: Path, command: Any):
    source = write(tmp_path, "seed: 5\nnum_envs: 8\nhidden_sizes: [32]\n")
    expected = Settings(seed=5, num_envs=8, hidden_sizes=(32,))
    assert parse(command, "test", [f"--config={source}"]).settings == expected
    assert parse(
        command, "test", ["--seed", "6", "--config", source, "--hidden-sizes", "16", "16"]
    ).settings == replace(expected, seed=6, hidden_sizes=(16, 16))


def test_a_file_in_the_folder_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Atari").write_text("seed: 9\n")
    assert load_settings("Atari", Settings) == Settings(seed=9)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"total_steps": 0}, "total_steps=0 must be at least 1"),
        (
            {"sync": "diloco", "bucket_cap_mb": 1.0},
            "bucket_cap_mb=1 is for gradients, and with sync='diloco' ranks send",
        ),
        ({"sync_every": 2}, "sync_every=2 is for weights; set sync to 'diloco' or 'local_sgd', too"),
        ({"hidden_sizes": (64, 0)}, r"hidden_sizes=\(64, 0\) must be widths of at least 1"),
        ({"target_kl": 0.0}, "target_kl=0.0 must be greater than 0"),
        ({"timeout": float("inf")}, "timeout=inf must be a finite number greater than 0"),
        ({"seed": 2**63}, r"seed=9223372036854775808 must be less than 2\*\*63"),
        ({"ent_coef": -0.1}, "ent_coef=-0.1 must not be negative"),
        ({"gamma": float("nan")}, r"gamma=nan must lie in \[0, 1\]"),
        ({"num_envs": 3, "num_steps": 5}, "num_minibatches=4 does not divide the 15 rows of a rank's rollout"),
        ({"num_micro_batches": 5}, "num_micro_batches=5 does not divide the .* rows of a minibatch"),
        ({"lr_schedule": "adaptive"}, "lr_schedule='adaptive' needs a KL divergence to aim at; set target_kl"),
        ({"compression": "fp15"}, "compression"),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**bad)
