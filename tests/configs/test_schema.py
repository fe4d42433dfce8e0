"""Every setting is documented, and the kinds of settings are those that flags can carry."""

from __future__ import annotations

from enum import StrEnum

import pytest

from jacobi_llm.configs.fields import SettingField, section_types, setting_fields
from jacobi_llm.configs.schema import Recipe

SETTINGS = list(setting_fields().values())


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_has_a_description(setting: SettingField) -> None:
    assert setting.info.description
    assert not setting.info.description.endswith(".")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_is_of_a_kind_that_flags_can_carry(setting: SettingField) -> None:
    assert setting.base in (str, int, float, bool) or issubclass(setting.base, StrEnum)
    assert not setting.name.startswith("no_"), "--no-KEY is the negation of --KEY"


def test_counts_of_tokens_and_memory_state_their_unit() -> None:
    for setting in SETTINGS:
        if setting.name in ("window", "max_tokens", "max_prompt_tokens", "max_length", "page_size"):
            assert "(tokens)" in (setting.info.description or ""), setting.key
        if setting.name.endswith("_mib"):
            assert "(MiB)" in (setting.info.description or ""), setting.key


def test_every_section_is_documented() -> None:
    assert list(section_types()) == list(Recipe.model_fields)
    for model in section_types().values():
        assert (model.__doc__ or "").strip().partition("\n")[0].endswith(".")
