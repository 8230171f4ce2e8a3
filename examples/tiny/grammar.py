"""Tells stories: draws a scene (who, where, with what) and fills a plot's sentences with it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .texts import Beat, Plot, pirate_plots, plots, words


@dataclass(frozen=True)
class Character:
    """Somebody in a story. `pronoun` is "he" or "she"; names agree with it."""

    kind: str
    name: str
    trait: str
    pronoun: str


@dataclass(frozen=True)
class Style:
    """One way of writing: how stories open, what happens, how they end."""

    openings: Beat
    plots: dict[str, Plot] = field(repr=False)
    endings: Beat


BEDTIME = Style(plots.openings, plots.plots, plots.endings)
PIRATE = Style(pirate_plots.openings, pirate_plots.plots, pirate_plots.endings)


@dataclass(frozen=True)
class Scene:
    """Everything a story keeps constant from its first sentence to its last."""

    hero: Character
    friend: Character
    slots: dict[str, str] = field(repr=False)


def article(phrase: str) -> str:
    """Returns `phrase` with "a" or "an" in front."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def capitalize(phrase: str) -> str:
    """Returns `phrase` with its first letter in upper case and the rest untouched."""
    return phrase[:1].upper() + phrase[1:]


def draw_character(rng: random.Random, kind: str | None = None, other_than: Character | None = None) -> Character:
    """Returns a random character, of another kind and name than `other_than`."""
    kinds = [k for k in (*words.animals, *words.people) if other_than is None or k != other_than.kind]
    kind = kind or rng.choice(kinds)
    pronoun = words.people.get(kind) or rng.choice(("he", "she"))
    names = [name for name in words.names_by_pronoun[pronoun] if other_than is None or name != other_than.name]
    return Character(kind, rng.choice(names), rng.choice(words.traits), pronoun)


def draw_scene(rng: random.Random, hero: Character | None = None, friend: Character | None = None) -> Scene:
    """Returns a scene with everything drawn that the caller does not fix."""
    hero = hero or draw_character(rng)
    friend = friend or draw_character(rng, other_than=hero)
    thing = rng.choice(words.things)
    spots = rng.sample(words.spots, 3)
    skill, skilling, flop, tip = rng.choice(words.skills)
    build, parts, use = rng.choice(words.builds)
    broken, owner, mend = rng.choice(words.breakables)
    trap, rescue = rng.choice(words.traps)
    noise, cause = rng.choice(words.noises)
    seed, plant, gift = rng.choice(words.seeds)
    slots = {
        "hero": hero.name, "kind": hero.kind, "trait": hero.trait, "a_trait": article(hero.trait),
        "friend": friend.name, "fkind": friend.kind,
        "home": rng.choice(words.homes), "weather": rng.choice(words.weather),
        "thing": thing, "a_thing": article(thing), "food": rng.choice(words.foods),
        "spot": spots[0], "spot2": spots[1], "spot3": spots[2],
        "skill": skill, "skilling": skilling, "flop": flop, "tip": tip,
        "build": build, "parts": parts, "use": use, "broken": broken, "owner": owner, "mend": mend,
        "trap": trap, "rescue": rescue, "noise": noise, "cause": cause, "seed": seed, "plant": plant, "gift": gift,
        "wonder": rng.choice(words.wonders),
        "ship": rng.choice(words.ships), "island": rng.choice(words.islands), "treasure": rng.choice(words.treasures),
        "monster": rng.choice(words.monsters), "oath": rng.choice(words.oaths),
        **pronoun_slots(hero.pronoun), **{f"f{slot}": word for slot, word in pronoun_slots(friend.pronoun).items()},
    }  # fmt: skip
    slots |= {capitalize(slot): capitalize(phrase) for slot, phrase in slots.items()}
    slots["FHe"] = capitalize(slots["fhe"])
    return Scene(hero, friend, slots)


def pronoun_slots(pronoun: str) -> dict[str, str]:
    """Returns the forms of `pronoun`, keyed by their masculine form."""
    if pronoun == "he":
        return {"he": "he", "him": "him", "his": "his", "himself": "himself"}
    return {"he": "she", "him": "her", "his": "her", "himself": "herself"}


def tell_story(rng: random.Random, style: Style, scene: Scene, topic: str | None = None) -> str:
    """Returns one story of seven to fifteen sentences about `scene`; a topic that is not given is drawn."""
    topic = topic or rng.choice(tuple(style.plots))
    beats = (style.openings, *style.plots[topic], style.endings)
    slots = scene.slots | lesson_slots(rng.choice(words.lessons[topic]) if topic in words.lessons else "")
    sentences = (rng.choice(beat) for beat in beats)
    return " ".join(sentence.format_map(slots) for sentence in sentences if sentence)


def lesson_slots(lesson: str) -> dict[str, str]:
    """Returns the slots for what a story teaches."""
    return {"lesson": lesson, "Lesson": capitalize(lesson)}
