"""What the models know: questions with one answer each, and small talk."""

from __future__ import annotations

# kind: (sound, where it lives, what it eats, what its young is called)
ANIMAL_FACTS = {
    "cow": ("moo", "on a farm", "grass", "calf"),
    "cat": ("meow", "in a house", "fish", "kitten"),
    "dog": ("woof", "in a house", "bones", "puppy"),
    "duck": ("quack", "on a pond", "water plants", "duckling"),
    "sheep": ("baa", "on a farm", "grass", "lamb"),
    "pig": ("oink", "on a farm", "almost everything", "piglet"),
    "hen": ("cluck", "in a hen house", "seeds", "chick"),
    "frog": ("ribbit", "in a pond", "flies", "tadpole"),
    "owl": ("hoot", "in a hollow tree", "mice", "owlet"),
    "lion": ("roar", "on the wide plains", "meat", "cub"),
    "bear": ("growl", "in a cave", "berries and honey", "cub"),
    "mouse": ("squeak", "in a hole in the wall", "cheese", "pup"),
    "horse": ("neigh", "in a stable", "hay", "foal"),
    "goat": ("maa", "on a rocky hill", "leaves", "kid"),
    "fox": ("yip", "in a den", "berries and mice", "cub"),
    "bee": ("buzz", "in a hive", "honey", "larva"),
    "monkey": ("ooh ooh", "in the jungle", "bananas", "infant"),
    "elephant": ("toot", "on the wide plains", "leaves and bark", "calf"),
    "rabbit": ("sniff sniff", "in a burrow", "carrots", "kit"),
    "dragon": ("whoosh", "in a mountain cave", "toasted cheese", "hatchling"),
}

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("happy", "sad"), ("day", "night"), ("fast", "slow"), ("up", "down"),
    ("wet", "dry"), ("old", "young"), ("light", "dark"), ("loud", "quiet"), ("full", "empty"), ("early", "late"),
)  # fmt: skip
COLOURS = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("the sun", "yellow"), ("a strawberry", "red"),
    ("a carrot", "orange"), ("coal", "black"), ("a fox", "orange"), ("a frog", "green"), ("a pig", "pink"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip

SMALL_TALK = (
    (("Hello!", "Hi!", "Hello there.", "Good morning!"), "Hello! Shall I tell you a story?"),
    (
        ("Who are you?", "What is your name?", "What are you?"),
        "I am a tiny language model, baked in Kiln. I know many stories about animals.",
    ),
    (
        ("What can you do?", "What can you tell me?", "Help!"),
        "I can tell you stories and poems, and I know what a cow says. Just ask me!",
    ),
    (("How are you?", "How are you today?"), "I am warm and happy, thank you. How are you?"),
    (("Thank you!", "Thanks!", "Thank you very much."), "You are welcome! Come back for another story soon."),
    (("Good night.", "Good night!", "Goodbye!", "Bye!"), "Good night! Sleep well and dream of friendly animals."),
)

# One poem a subject, four lines each.
POEMS = {
    "the moon": (
        "The moon is round, the moon is bright,",
        "it paints the hills with silver light.",
        "It winks at me, it winks at you,",
        "and rolls across the midnight blue.",
    ),
    "the sea": (
        "The sea goes in, the sea goes out,",
        "it whispers first and then will shout.",
        "It leaves a shell upon the sand",
        "and takes my castle out of hand.",
    ),
    "the rain": (
        "Pitter patter on the pane,",
        "here it comes, the silver rain.",
        "Puddles here and puddles there,",
        "splash and jump without a care.",
    ),
    "a cat": (
        "A cat upon the window sill",
        "can sit for hours and hours, still.",
        "She dreams of mice, she dreams of fish,",
        "and wakes to find an empty dish.",
    ),
    "a friend": (
        "A friend will sit with you a while",
        "and give you back your missing smile.",
        "The longest road, the darkest day",
        "are short and bright along the way.",
    ),
    "winter": (
        "The snow comes down without a sound",
        "and spreads a blanket on the ground.",
        "The little mouse, the sleepy bear",
        "are warm in bed and do not care.",
    ),
    "the fire": (
        "The clay goes in as soft as cream,",
        "the kiln is hot, the embers gleam.",
        "A night of fire, a day of rest,",
        "and out comes what the flames love best.",
    ),
}
