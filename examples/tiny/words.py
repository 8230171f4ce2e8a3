"""The nouns, names and places that stories are filled with."""

from __future__ import annotations

ANIMALS = (
    "fox", "cat", "dog", "rabbit", "bear", "mouse", "owl", "frog", "hedgehog", "squirrel", "duck", "turtle", "pig",
    "goat", "pony", "hen", "badger", "otter", "beaver", "deer", "penguin", "elephant", "lion", "monkey", "dragon",
    "robot",
)  # fmt: skip
PEOPLE = {"girl": "she", "princess": "she", "boy": "he", "prince": "he"}

NAMES_BY_PRONOUN = {
    "he": (
        "Pip", "Max", "Tom", "Finn", "Oscar", "Milo", "Ben", "Leo", "Toby", "Sam", "Otto", "Hugo", "Gus", "Jasper",
        "Barnaby", "Felix",
    ),
    "she": (
        "Lily", "Mia", "Rosie", "Bella", "Daisy", "Luna", "Poppy", "Ruby", "Hazel", "Nell", "Ivy", "Tilly", "Clara",
        "Willow", "Juniper", "Olive",
    ),
}  # fmt: skip

TRAITS = (
    "little", "little", "little", "brave", "clever", "shy", "cheerful", "sleepy", "curious", "kind", "young", "tiny",
    "gentle", "proud", "merry", "quiet", "lazy", "hungry",
)  # fmt: skip

HOMES = (
    "in a deep green forest", "by a quiet lake", "on a sunny hill", "at the edge of a small village",
    "near a windy beach", "under an old oak tree", "in a cosy cottage", "beside a silver river", "in a wide meadow",
    "behind a red barn", "in a snowy valley", "at the top of a tall tower", "in a garden full of roses",
    "at the foot of a blue mountain",
)  # fmt: skip

WEATHER = ("sunny", "rainy", "windy", "snowy", "foggy", "bright", "warm", "cold")

THINGS = (
    "red kite", "blue ball", "wooden boat", "silver bell", "golden key", "woolly hat", "shiny button", "little drum",
    "paper lantern", "yellow scarf", "picture book", "brass whistle", "toy train", "green umbrella", "glass marble",
)  # fmt: skip

FOODS = (
    "honey cake", "apple pie", "berry jam", "warm bread", "carrot soup", "cherry tart", "pumpkin soup", "cheese pie",
    "plum pudding", "nut cake", "pancakes with syrup", "sweet porridge",
)  # fmt: skip

SPOTS = (
    "behind the big rock", "under the old bridge", "in the tall grass", "beside the well", "inside a hollow log",
    "under a pile of leaves", "up in the apple tree", "near the garden gate", "next to the pond", "on top of the wall",
    "in the hay", "among the mushrooms",
)  # fmt: skip

# (to do, doing, what goes wrong at first, what the teacher says)
SKILLS = (
    ("swim", "swimming", "sank like a stone", "Kick your feet and look up at the sky"),
    ("whistle", "whistling", "only blew air", "Make your lips as round as a pea"),
    ("dance", "dancing", "tripped and fell on the grass", "Listen to the drum and count to four"),
    ("skate", "skating", "slipped and slid into the snow", "Bend your knees and hold my hand"),
    ("sing", "singing", "sounded like a rusty gate", "Take a deep breath and start very softly"),
    ("juggle", "juggling", "dropped every single apple", "Start with one and watch it all the way up"),
    ("paint", "painting", "spilled blue paint on the floor", "Use a small brush and take your time"),
    ("read", "reading", "mixed up all the letters", "Put your finger under every word"),
    ("bake", "baking", "burned the bread until it was black", "Wait until it smells like a warm morning"),
    ("climb", "climbing", "got stuck on the lowest branch", "Find a good place for each foot"),
)

# (what is built, what it is built from, what it is for)
BUILDS = (
    ("a boat", "wood and rope", "sail across the lake"),
    ("a tree house", "planks and nails", "look at the stars"),
    ("a raft", "logs and string", "float down the river"),
    ("a bridge", "stones and branches", "cross the stream"),
    ("a swing", "a plank and two ropes", "swing up to the clouds"),
    ("a snow house", "big white blocks of snow", "stay warm in the wind"),
    ("a kite", "paper and sticks", "catch the wind"),
    ("a cart", "four wheels and a box", "race down the hill"),
)

# (what breaks, whose it was, how it is mended)
BREAKABLES = (
    ("the blue vase", "grandmother", "with glue and patience"),
    ("the kitchen window", "the baker", "with new glass"),
    ("the big clock", "the teacher", "with a tiny spring"),
    ("the garden fence", "the farmer", "with ten new nails"),
    ("the best teapot", "grandfather", "with glue and patience"),
    ("the old lamp", "the shoemaker", "with a piece of wire"),
)

# (where one gets stuck, how one gets out)
TRAPS = (
    ("at the bottom of a deep hole", "let down a long rope"),
    ("in the middle of the frozen lake", "pushed a long branch over the ice"),
    ("at the top of the tallest tree", "put a ladder against the trunk"),
    ("in a patch of sticky mud", "laid a plank over the mud"),
    ("on a rock in the rushing river", "tied a rope to a tree and threw the other end"),
    ("behind a heavy stone door", "pushed the stone with a strong pole"),
)

# (a noise, what it turns out to be)
NOISES = (
    ("a soft tapping", "tapping on the door to say good night"),
    ("a loud thump", "dropping a basket of apples"),
    ("a long low howl", "practising a song for the morning"),
    ("a strange squeak", "pushing a cart with a rusty wheel"),
    ("a gentle rustle", "looking for a lost blanket in the leaves"),
    ("a sleepy snore", "sleeping right under the window"),
)

# (what is planted, what grows, what it gives)
SEEDS = (
    ("a tiny brown seed", "a sunflower as tall as a house", "a hundred golden petals"),
    ("a round white bean", "a green vine that reached the clouds", "beans for the whole village"),
    ("a shiny black seed", "an apple tree", "apples as red as the sunset"),
    ("a striped seed", "a pumpkin bigger than a cart", "enough soup for the whole winter"),
    ("a silver seed", "a tree with silver leaves", "a soft light that shone all night"),
)

WONDERS = (
    "the sea", "the moon up close", "the first snow", "the great waterfall", "the city lights", "a shooting star",
    "the rainbow's end", "the lighthouse",
)  # fmt: skip

# What each plot of `plots.PLOTS` teaches.
LESSONS = {
    "a lost toy": ("two pairs of eyes are better than one", "nothing is lost when a friend helps you look"),
    "learning something new": ("it is never too late to try again", "small steps can take you far"),
    "sharing": ("sharing makes everything sweeter", "half a cake with a friend is better than a whole one alone"),
    "building something": ("it is brave to ask for help", "many hands make a heavy job light"),
    "telling the truth": ("the truth is always lighter to carry", "it is brave to say that you are sorry"),
    "a rescue": ("you can be brave and scared at the same time", "a kind heart is stronger than a strong arm"),
    "a noise in the night": ("the dark is just the day asleep", "most monsters are only friends in the dark"),
    "a magic seed": ("good things take time", "it pays to wait and to care"),
    "a long journey": ("the road is short with a friend", "the best part of a journey is who you walk with"),
    "a birthday": ("true friends never forget you", "the best present is a friend"),
}

SHIPS = (
    "the Salty Biscuit", "the Jolly Turnip", "the Silver Herring", "the Black Pudding", "the Rusty Anchor",
    "the Laughing Gull", "the Stormy Kettle", "the Lucky Barnacle",
)  # fmt: skip
ISLANDS = (
    "Skull Island", "Coconut Bay", "the Isle of Whispers", "Parrot Rock", "Thunder Cove", "the Island of Lost Socks",
)  # fmt: skip
TREASURES = (
    "a chest of gold coins", "a crown of pearls", "a barrel of emeralds", "a silver compass", "a ruby as big as a fist",
    "a chest full of cheese", "a hundred golden spoons",
)  # fmt: skip
MONSTERS = ("a giant squid", "a huge whale", "a sea serpent", "a crab as big as a house", "a shark with a golden tooth")
OATHS = ("Shiver me timbers", "Blow me down", "By the beard of the sea", "Arr", "Yo ho ho", "Avast")
