from pathlib import Path

import pytest

from prefetchd.config import ConfigError, Settings, compile_settings, load_settings

DOCS = Path(__file__).parents[2] / "docs"


def test_everything_unset_gives_the_defaults() -> None:
    assert load_settings({}) == Settings()


def test_file_overrides_default_and_variable_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "prefetchd.toml"
    file.write_text('target = "b200"\njobs = 3\n')

    settings = load_settings({"PREFETCHD_JOBS": "5", "PREFETCHD_CONFIG": str(file)})

    assert (settings.target, settings.jobs) == ("b200", 5)


def test_file_in_the_users_configuration_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "prefetchd").mkdir()
    (tmp_path / "prefetchd" / "prefetchd.toml").write_text("max_tokens = 17\n")

    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}).max_tokens == 17


def test_misspelt_key_names_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_token = 4\n")

    with pytest.raises(ConfigError, match=r"a\.toml.*'max_token'.*did you mean 'max_tokens'"):
        load_settings({}, file)


@pytest.mark.parametrize(
    ("name", "value"),
    [("PREFETCHD_JOBS", "many"), ("PREFETCHD_MAX_TOKENS", "0"), ("PREFETCHD_JOB_TIMEOUT_S", "-1")],
)
def test_bad_variable_names_itself_and_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = '{value}'"):
        load_settings({name: value})


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("PREFETCHD_ON_ENGINE_COMPILE", "eror", "ignore, warn, error"),
        ("PREFETCHD_OBSERVE", "maybe", "true, false, 1, 0"),
    ],
)
def test_value_that_is_none_of_a_few_tells_them(name: str, value: str, known: str) -> None:
    with pytest.raises(ConfigError, match=f"'{value}'.*one of {known}$"):
        load_settings({name: value})


@pytest.mark.parametrize(("value", "meant"), [("true", True), ("false", False), ("1", True), ("0", False)])
def test_each_word_for_yes_and_no_is_known(value: str, meant: bool) -> None:
    assert load_settings({"PREFETCHD_OBSERVE": value}).observe is meant


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_every_setting_is_told_of_where_users_look(name: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))

    assert f"PREFETCHD_{name.upper()}" in pages or f"`{name}`" in pages or f"{name} = " in pages


def test_named_file_that_is_not_there_says_which_variable_named_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PREFETCHD_CONFIG"):
        load_settings({"PREFETCHD_CONFIG": str(tmp_path / "none.toml")})


def test_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("jobs = [")

    with pytest.raises(ConfigError, match=r"a\.toml: not TOML"):
        load_settings({}, file)


def test_real_nvcc_of_the_file_reaches_the_compilers(tmp_path: Path) -> None:
    file = tmp_path / "prefetchd.toml"
    file.write_text('real_nvcc = "/opt/cuda/bin/nvcc"\n')

    environment = compile_settings(load_settings({}, file), {"PATH": "/bin"})

    assert environment == {"PATH": "/bin", "PREFETCHD_REAL_NVCC": "/opt/cuda/bin/nvcc"}
