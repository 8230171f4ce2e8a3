"""The same cast at sea: openings, endings and plots of the pirate fine-tune. Form as in `plots`."""

from __future__ import annotations

from .plots import Beat, Plot

OPENINGS: Beat = (
    "Once upon a time, on the salty sea, there sailed {a_trait} {kind} named Captain {hero}. {His} ship was {ship}.",
    "Once upon a time, {a_trait} {kind} named Captain {hero} sailed the seven seas on {ship}.",
    "Once upon a time, there was a pirate {kind} named Captain {hero}, and {his} ship was {ship}.",
    "The {trait} {kind} was a pirate. Captain {hero} was {his} name, and {ship} was {his} ship.",
    "The {trait} {kind} sailed the seven seas on {ship}. The crew called {him} Captain {hero}.",
    "There once was a pirate {kind} called Captain {hero}, who sailed on {ship}.",
    "{Oath}! This is the tale of Captain {hero}, the {trait} pirate {kind} of {ship}.",
    "Gather round, me hearties, and hear of Captain {hero}, the {trait} {kind} who sailed on {ship}.",
)

ENDINGS: Beat = (
    "And they sailed off into the sunset, singing yo ho ho.",
    "And that, me hearties, is how Captain {hero} became the most famous {kind} of the seven seas.",
    '"{Oath}!" said Captain {hero}. "What a day to be a pirate!"',
    "Then they raised the black flag and sailed for home.",
    "And they feasted on fish and biscuits until the stars fell into the sea.",
    "And the crew of {ship} drank to {friend} all night long.",
)

TREASURE: Plot = (
    (
        "One morning, the first mate, {friend} the {fkind}, found an old map in a bottle.",
        'A bottle bumped against the ship. Inside was a map! "{Oath}!" cried {friend} the {fkind}, the first mate.',
    ),
    (
        "A big red cross marked the spot, and the spot was on {island}.",
        'The map showed the way to {island}. "Set the sails!" roared the captain.',
    ),
    (
        "They sailed for ten days and ten nights, and the waves were as tall as towers.",
        "The wind filled the sails, and {ship} flew over the waves.",
    ),
    (
        "On the beach they counted one hundred steps to the east and began to dig.",
        "They crept past the sleeping crabs and dug a deep hole under a palm tree.",
    ),
    (
        "Clunk! The spade hit something hard. It was {treasure}!",
        '"I see it!" shouted {friend}. In the sand lay {treasure}.',
    ),
    (
        '"Half for ye and half for me," said Captain {hero}, for a fair pirate always shares.',
        'The captain danced a jig on the sand. "We are rich, me hearties!" {he} cried.',
    ),
)

MONSTER: Plot = (
    (
        "One night, the sea began to bubble. Out of the deep came {monster}!",
        "Near {island}, the ship stopped with a bump. {Monster} was holding it!",
    ),
    (
        '"{Oath}!" cried {friend} the {fkind}, and hid in a barrel.',
        "The crew shook from hat to boots, and {friend} the {fkind} dropped the soup.",
    ),
    (
        "But Captain {hero} did not draw {his} sword. {He} looked the beast in the eye.",
        '"Fire the cannons!" called {friend}. "No," said Captain {hero}. "It is crying. Look at its eyes."',
    ),
    (
        '"What be the matter, ye big beast?" asked the captain. "I have a toothache," said the monster.',
        '"Why do ye scare honest pirates?" asked the captain. "I am lonely," said the monster. "Nobody sings to me."',
    ),
    (
        "So the crew gave the monster a barrel of soup and sang all their songs.",
        "So the captain told it jokes until it laughed, and the whole sea shook with it.",
    ),
    (
        "To say thanks, it gave them {treasure} from the bottom of the sea.",
        "And the monster pushed {ship} all the way to {island}, faster than the wind.",
    ),
)

STORM: Plot = (
    (
        "One day the sky turned black, and the thunder rolled like a hundred cannons.",
        'A storm was coming. "All hands on deck!" shouted Captain {hero}.',
    ),
    (
        "A great wave broke the mast and washed the wheel away.",
        "The wind tore the sails, and the rain came in sideways.",
    ),
    (
        '"We are sinking!" cried {friend} the {fkind}. "Not on my watch," growled the captain.',
        "{Friend} the {fkind} fell over the side! The captain threw a rope and pulled {fhim} back on board.",
    ),
    (
        "They patched the hole with an old boot, and they sewed a new sail from their trousers.",
        "Captain {hero} tied {himself} to the deck and steered with {his} own two hands.",
    ),
    (
        "In the morning the sea was as flat as a pancake, and before them lay {island}.",
        "At dawn the storm was over, and on the beach of {island} something was shining. It was {treasure}!",
    ),
    (
        '"Ye are the best crew on the seven seas," said the captain, and wiped away a salty tear.',
        '"Three cheers for the captain!" cried {friend}. "Hip hip, arr!"',
    ),
)

THIEF: Plot = (
    (
        'Somebody had stolen the last biscuit! "{Oath}!" roared Captain {hero}. "Who ate it?"',
        'One morning the biscuit barrel was empty. "There be a thief on board," growled Captain {hero}.',
    ),
    (
        '"It was not me," said {friend} the {fkind}, but there were crumbs on {fhis} nose.',
        "Everybody looked at {friend} the {fkind}, who turned as red as a lobster.",
    ),
    (
        '"Walk the plank!" shouted the crew. The plank was long, and the sharks were smiling.',
        "The captain put on {his} biggest hat and called the whole crew together.",
    ),
    (
        '"I was so hungry," said {friend}, "and I was too scared to ask."',
        '"I did not eat it," said {friend}. "I gave it to the parrot. It is his birthday."',
    ),
    (
        "Captain {hero} pulled {his} beard for a while. Then {he} began to laugh.",
        "Nobody spoke. Then the captain took a biscuit from under {his} own hat and broke it in two.",
    ),
    (
        '"On this ship we share," said the captain. "Turn the ship! We sail to {island} for more biscuits!"',
        "So they baked a mountain of biscuits, and even the parrot was full.",
    ),
)

RACE: Plot = (
    (
        (
            "At {island} they met another ship, and on it stood {friend} the {fkind}. "
            '"My ship is faster!" called {friend}.'
        ),
        (
            "One bright day, {friend} the {fkind} came sailing by. "
            '"I bet ye {treasure} that I win a race!" called {friend}.'
        ),
    ),
    (
        '"Never!" shouted Captain {hero}. "First one to {island} wins!"',
        '"{Oath}! Ye will eat my bubbles," said Captain {hero}.',
    ),
    (
        "Off they went. The flags cracked, and the parrots screamed.",
        "The cannons boomed, and both ships flew over the waves.",
    ),
    (
        "Halfway there, the other ship hit a rock and began to sink.",
        "Then {monster} rose from the deep and grabbed the other ship.",
    ),
    (
        '"If I stop, I lose," thought the captain. But a true pirate helps. {He} turned the ship around.',
        'Captain {hero} threw {his} hat on the deck. "Forget the race!" {he} cried. "Save them!"',
    ),
    (
        '"Ye lost the race but won a friend," said {friend}, and gave {him} {treasure}.',
        "So nobody won the race, and both crews danced on the beach until the moon went down.",
    ),
)

PLOTS: dict[str, Plot] = {
    "a treasure": TREASURE,
    "a sea monster": MONSTER,
    "a storm": STORM,
    "a thief": THIEF,
    "a race": RACE,
}
