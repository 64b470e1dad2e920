from burnish.utils.wording import without_endless_words


def test_a_sentence_is_found_around_a_word_without_end():
    text = f"a.b={'x' * 5000}: there is no key a.b. Did you mean a.c?"
    short = without_endless_words(text)
    assert len(short) < 300
    assert short.startswith("a.b=xxx")
    assert "(5,005 characters)" in short
    assert short.endswith(": there is no key a.b. Did you mean a.c?".partition(" ")[2])


def test_words_as_long_as_paths_may_be_stay_whole():
    text = f"{'/folder' * 100} {'many words ' * 1000}"
    assert without_endless_words(text) == text
