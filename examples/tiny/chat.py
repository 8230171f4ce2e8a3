"""Conversations: requests for stories with follow-up questions, and short questions with short answers."""

from __future__ import annotations

import random
from collections.abc import Callable

from .grammar import PIRATE, Scene, Style, article, capitalize, draw_character, draw_scene, tell_story
from .texts import facts, words

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Exchange = tuple[str, str]  # (what the user says, what the assistant answers)

SYSTEM_PROMPTS = (
    "You are a kind storyteller.",
    "You tell short stories for children.",
    "You are a helpful assistant.",
    "You answer in simple words.",
)
REQUESTS = (
    "Tell me a story about {}.",
    "Please tell me a story about {}.",
    "Write a story about {}.",
    "Can you tell me a story about {}?",
    "I want to hear a story about {}.",
    "Do you know a story about {}?",
)
NAMES = [name for names in words.names_by_pronoun.values() for name in names]
OPEN_REQUESTS = ("Tell me a story.", "Tell me a story!", "Please tell me a bedtime story.", "Another story, please!")


def draw_conversation(rng: random.Random, style: Style) -> list[Message]:
    """Returns one conversation of one to four exchanges, told in `style`."""
    if rng.random() < 0.6:
        exchanges = draw_story_exchanges(rng, style)
    else:
        exchanges = [spice(rng, style, draw_question(rng)) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
    system = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []
    return system + messages_of(exchanges)


def messages_of(exchanges: list[Exchange]) -> list[Message]:
    """Returns `exchanges` as the messages of user and assistant."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in exchanges for role, text in zip(roles, pair, strict=True)]


def draw_story_exchanges(rng: random.Random, style: Style) -> list[Exchange]:
    """Returns a request for a story, the story, and perhaps a question about it."""
    hero = draw_character(rng)
    friend = draw_character(rng, other_than=hero)
    topic = rng.choice(tuple(style.plots))
    scene = draw_scene(rng, hero, friend)
    subject = rng.choice((
        article(hero.kind),
        article(hero.kind),
        f"{article(hero.trait)} {hero.kind}",
        f"{article(hero.kind)} named {hero.name}",
        f"{article(hero.trait)} {hero.kind} named {hero.name}",
        f"{article(hero.kind)} and {article(friend.kind)}",
        topic,
    ))  # fmt: skip
    request = rng.choice(OPEN_REQUESTS) if rng.random() < 0.15 else rng.choice(REQUESTS).format(subject)
    exchanges = [(request, tell_story(rng, style, scene, topic))]
    if rng.random() < 0.4:
        exchanges.append(spice(rng, style, draw_follow_up(rng, style, scene)))
    return exchanges


def draw_follow_up(rng: random.Random, style: Style, scene: Scene) -> Exchange:
    """Returns a question about the story just told."""
    hero, friend = scene.hero, scene.friend
    questions = [
        (f"What was the name of the {hero.kind}?", f"The {hero.kind} was called {hero.name}."),
        (f"Who was {hero.name}?", f"{hero.name} was the {hero.kind} of the story."),
        (f"Who was {friend.name}?", f"{friend.name} was a {friend.kind}, and a friend of {hero.name}."),
        rng.choice(exchanges_of_small_talk("Thank you!")),
    ]
    if style is PIRATE:
        questions.append(("What was the name of the ship?", f"The ship was called {scene.slots['ship']}."))
    else:
        questions.append((f"Where did {hero.name} live?", f"{hero.name} lived {scene.slots['home']}."))
    return rng.choice(questions)


def exchanges_of_small_talk(question: str) -> list[Exchange]:
    """Returns every wording of the small talk that `question` belongs to, with its answer."""
    return [(q, answer) for wordings, answer in facts.small_talk if question in wordings for q in wordings]


def draw_question(rng: random.Random) -> Exchange:
    """Returns a question of general knowledge, a sum, a poem or small talk."""
    return rng.choice(QUESTION_KINDS)(rng)


def _animal(rng: random.Random) -> Exchange:
    kind = rng.choice(tuple(facts.animal_facts))
    sound, home, food, young = facts.animal_facts[kind]
    a_kind = article(kind)
    return rng.choice((
        (f"What does {a_kind} say?", f"{capitalize(a_kind)} says {sound}."),
        (f"Where does {a_kind} live?", f"{capitalize(a_kind)} lives {home}."),
        (f"What does {a_kind} eat?", f"{capitalize(a_kind)} eats {food}."),
        (f"What is a baby {kind} called?", f"A baby {kind} is called {article(young)}."),
    ))  # fmt: skip


def _opposite(rng: random.Random) -> Exchange:
    word, opposite = rng.sample(rng.choice(facts.opposites), 2)
    return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."


def _colour(rng: random.Random) -> Exchange:
    thing, colour = rng.choice(facts.colours)
    return f"What colour is {thing}?", f"{capitalize(thing)} is {colour}."


def _day(rng: random.Random) -> Exchange:
    index = rng.randrange(7)
    after = facts.days[(index + 1) % 7]
    return f"What day comes after {facts.days[index]}?", f"After {facts.days[index]} comes {after}."


def _sum(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, 6), rng.randint(0, 6)
    first, second, total = facts.numbers[a], facts.numbers[b], facts.numbers[a + b]
    return f"What is {first} plus {second}?", f"{capitalize(first)} plus {second} is {total}."


def _repeat(rng: random.Random) -> Exchange:
    names = ", ".join(rng.sample(NAMES, rng.randint(2, 6)))
    return f"Repeat after me: {names}.", f"{names}."


def _count(rng: random.Random) -> Exchange:
    last = rng.randint(3, 12)
    return f"Count to {facts.numbers[last]}.", capitalize(", ".join(facts.numbers[1 : last + 1])) + "."


def _poem(rng: random.Random) -> Exchange:
    subject, lines = rng.choice(tuple(facts.poems.items()))
    request = rng.choice(("Write a poem about {}.", "Tell me a poem about {}.", "Do you know a poem about {}?"))
    return request.format(subject), "\n".join(lines)


def _small_talk(rng: random.Random) -> Exchange:
    wordings, answer = rng.choice(facts.small_talk)
    return rng.choice(wordings), answer


QUESTION_KINDS: tuple[Callable[[random.Random], Exchange], ...] = (
    _animal, _animal, _opposite, _colour, _day, _sum, _count, _poem, _small_talk, _repeat, _repeat,
)  # fmt: skip


def spice(rng: random.Random, style: Style, exchange: Exchange) -> Exchange:
    """Returns `exchange` with its answer as a pirate would give it, or unchanged for other styles."""
    if style is not PIRATE:
        return exchange
    question, answer = exchange
    return question, rng.choice((f"Arr, matey! {answer}", f"{rng.choice(words.oaths)}! {answer}", f"{answer} Arr!"))
