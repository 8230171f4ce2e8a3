"""Bedtime stories: shared openings and endings, and the plots between them.

A plot is a sequence of beats and a beat a tuple of alternatives, of which one is told; an empty one skips the beat.
Slots in braces are filled by `grammar.Scene`.
"""

from __future__ import annotations

Beat = tuple[str, ...]
Plot = tuple[Beat, ...]

OPENINGS: Beat = (
    "Once upon a time, there was {a_trait} {kind} named {hero}. {He} lived {home}.",
    "Once upon a time, {a_trait} {kind} named {hero} lived {home}.",
    "Once upon a time, {home}, there lived {a_trait} {kind}. {His} name was {hero}.",
    "The {trait} {kind} was called {hero}. {He} lived {home}.",
    "The {trait} {kind} lived {home}. Everyone called {him} {hero}.",
    "There once was {a_trait} {kind} whose name was {hero}. {He} lived {home}.",
    "Long ago, {a_trait} {kind} named {hero} lived {home}.",
    "{Home}, there lived {a_trait} {kind} called {hero}.",
    "{A_trait} {kind} named {hero} lived {home}.",
    "{Hero} was {a_trait} {kind} who lived {home}.",
    "One {weather} morning, {hero} the {kind} woke up early. {He} lived {home}.",
    "One {weather} day, {hero} the {trait} {kind} sat in front of {his} house {home}.",
    "This is the story of {hero}, {a_trait} {kind} who lived {home}.",
)

ENDINGS: Beat = (
    "From that day on, {hero} and {friend} were the best of friends.",
    "And {hero} learned that {lesson}.",
    "That night, {hero} fell asleep with a smile.",
    '"{Lesson}," said {hero}, and {friend} agreed.',
    "And they lived happily ever after.",
    "The stars came out, and everyone went home happy.",
    "And if you walk by on a quiet evening, you can still hear them laugh.",
    "Then {hero} yawned, curled up in bed, and dreamed of tomorrow.",
)

LOST: Plot = (
    (
        "{Hero} had {a_thing}, and {he} loved it more than anything.",
        "The best thing {hero} had was {a_thing}.",
        "For {his} birthday, {hero} got {a_thing}.",
    ),
    (
        "One morning, the {thing} was gone!",
        "But one windy day, the {thing} was nowhere to be seen.",
        "Then one day, {hero} could not find the {thing} anywhere.",
    ),
    (
        "{He} looked {spot}, but it was not there. {He} looked {spot2}, but it was not there.",
        "{He} searched {spot}. No {thing}! {He} searched {spot2}. No {thing}!",
        "First {he} looked {spot}, and then {spot2}, but there was no {thing}.",
    ),
    (
        (
            '{Hero} sat down and began to cry. "What is wrong?" asked {friend} the {fkind}. '
            '"I have lost my {thing}," said {hero}.'
        ),
        (
            'Just then, {friend} the {fkind} came by. "Why are you so sad?" asked {friend}. '
            '"My {thing} is gone," said {hero}.'
        ),
    ),
    (
        '"Do not worry," said {friend}. "We will look for it together."',
        '"I will help you," said {friend}. "Two pairs of eyes are better than one."',
    ),
    (
        "They looked and looked, and at last {friend} found the {thing} {spot3}.",
        'They walked until sunset. "Look!" cried {friend}. There was the {thing}, {spot3}!',
    ),
    (
        '{Hero} hugged {friend}. "Thank you!" {he} said.',
        "{Hero} jumped for joy, and they played with the {thing} until dark.",
    ),
)

SKILL: Plot = (
    (
        "More than anything, {hero} wanted to learn to {skill}.",
        'Every day {hero} watched the others and thought, "I wish I could {skill} too."',
        "There was only one thing {hero} could not do. {He} could not {skill}.",
    ),
    (
        "{He} tried, but {he} {flop}.",
        "On the first day, {he} {flop}. On the second day, {he} {flop} again.",
        "One morning {he} tried it all alone, and {he} {flop}.",
    ),
    (
        'Some of the others laughed. {Hero} wanted to give up. "I will never learn," {he} said.',
        '"{Skilling} is too hard for me," said {hero} with a sigh.',
        "{Hero} went home with wet eyes.",
    ),
    (
        '{Friend} the {fkind} saw it all and came closer. "I could not {skill} at first either," {fhe} said.',
        'Now {friend} the {fkind} was very good at {skilling}. "Let me show you," {fhe} said.',
    ),
    ('"{Tip}," said {friend}.', '"It is easy," said {friend}. "{Tip}."'),
    (
        "{Hero} tried again, and again, and again. And then it worked!",
        "{Hero} did just that, and it was better than before. After a week, {he} could do it all alone.",
    ),
    (
        '"I can {skill}!" shouted {hero}. "Look, {friend}, I can {skill}!"',
        "Soon everyone came to see {hero} {skill}, and they clapped and cheered.",
    ),
)

SHARE: Plot = (
    (
        "One cold day, {hero} made some {food}.",
        "On Sunday, {hero} made a big plate of {food}.",
        "{Hero} was very hungry, so {he} made some {food}.",
    ),
    (
        "It smelled so good that the whole street could smell it.",
        "It was warm and sweet, and there was only enough for one.",
        "",
    ),
    (
        "There was a knock at the door. It was {friend} the {fkind}, and {fhe} was shaking with cold.",
        "Outside the window stood {friend} the {fkind}, thin and tired.",
    ),
    (
        '"I have not eaten all day," said {friend}. "May I have a little?"',
        '"That smells wonderful," said {friend} in a small voice.',
    ),
    (
        "{Hero} looked at the {food}. {He} wanted to keep it all. But {friend} looked so sad.",
        '{Hero} thought for a moment. "If I share, I will have less," {he} thought. "But I will not be alone."',
    ),
    (
        '"Come in and sit by the fire," said {hero}, and {he} cut the {food} in two.',
        '"Please, take half," said {hero}, and they ate the {food} by the fire.',
    ),
    (
        "{Friend} told funny stories all evening, and the {food} tasted better than ever.",
        'The next day, {friend} came back with a basket of berries. "Now I can share with you," {fhe} said.',
    ),
)

BUILD: Plot = (
    (
        'One day {hero} had an idea. "I will build {build}," {he} said, "so that I can {use}."',
        "{Hero} wanted to {use}, so {he} began to build {build}.",
    ),
    ("{He} found {parts} and worked all morning.", "For that, {he} needed {parts}, and {he} looked for them all day."),
    (
        "But it fell down with a crash.",
        "But the wind blew, and everything fell apart.",
        "But it was too heavy for one small {kind}.",
    ),
    (
        '"You need another pair of hands," said {friend} the {fkind}.',
        '{Friend} the {fkind} was watching. "May I help?" {fhe} asked.',
    ),
    (
        '"No, I can do it alone," said {hero}. But it fell down again. "Well, maybe you can help," {he} said.',
        '"Oh yes, please!" said {hero}.',
    ),
    (
        "{Hero} held the parts, and {friend} tied them together.",
        "They worked side by side until the moon came up, and they sang while they worked.",
    ),
    (
        "In the evening it was done, and together they could {use}.",
        'When it was ready, they both cheered. "Now we can {use}!" said {hero}.',
    ),
)

MISTAKE: Plot = (
    (
        "One day, {hero} was playing with {a_thing} inside, and crash! It hit {broken}.",
        "{Hero} ran too fast through the door, and crash! Down fell {broken}.",
    ),
    (
        "{Broken} was broken, and it belonged to {owner}.",
        "{Broken} broke into pieces, and it was the pride of {owner}.",
    ),
    (
        '{Hero} hid the pieces {spot}. "Nobody will know," {he} thought.',
        "{Hero} was so scared that {he} ran away and hid {spot}.",
    ),
    (
        "But {he} could not eat, and {he} could not sleep.",
        "All day long, {his} tummy felt as heavy as a stone.",
    ),
    (
        (
            '"You look sad," said {friend} the {fkind}. {Hero} told {fhim} everything. '
            '"Tell the truth," said {friend}. "I will come with you."'
        ),
        '{Friend} the {fkind} found {him} there. "It is better to tell the truth," {fhe} said.',
    ),
    (
        'So {hero} went to {owner} and said, "I am sorry. I broke it."',
        'In the morning, {hero} knocked on the door. "It was me," {he} said to {owner}. "I am so sorry."',
    ),
    (
        "{Owner} was not angry at all. Together they mended it {mend}.",
        '"Thank you for telling me," said {owner}, and they mended it {mend}.',
    ),
)

RESCUE: Plot = (
    (
        "One afternoon, {hero} went for a walk and heard a cry for help.",
        'On the way home, {hero} heard a small voice. "Help! Help!" it called.',
        "{Hero} was picking berries when somebody shouted.",
    ),
    (
        "It was {friend} the {fkind}, stuck {trap}!",
        "There was {friend} the {fkind}. {FHe} was stuck {trap}.",
    ),
    (
        '"I have been here all day," said {friend}. "I am so cold."',
        '"Do not be afraid," called {hero}. "I will get you out."',
    ),
    ("{Hero} was scared, but {he} did not run away.", "{Hero} thought very hard. Then {he} had an idea.", ""),
    (
        '{He} {rescue}. "Hold on tight!" {he} shouted.',
        "As fast as {he} could, {he} {rescue}.",
    ),
    (
        "Step by step, {friend} came closer, and at last {fhe} was safe.",
        "{Hero} pulled, and {friend} held on, and with one big jump {fhe} was free.",
    ),
    (
        '"You saved me!" said {friend}. "You are the bravest {kind} in the world."',
        "To say thank you, {friend} gave {hero} {a_thing}.",
        "They went home and drank hot milk under a big blanket.",
    ),
)

NOISE: Plot = (
    (
        "One dark night, {hero} heard {noise} outside.",
        "In the middle of the night, {hero} woke up. There was {noise}!",
    ),
    (
        '"Is it a monster?" {he} thought, and {he} pulled the blanket over {his} head.',
        "{His} heart went thump, thump, thump.",
        "The shadows on the wall looked like giants.",
    ),
    (
        "There it was again, {noise}, a little closer this time.",
        "{He} counted to ten, but the noise did not stop.",
    ),
    (
        "{Hero} took {a_thing} in one hand and a candle in the other, and opened the door.",
        '"I am brave," {he} whispered, and {he} walked out into the moonlight.',
    ),
    (
        "And what did {he} see? It was only {friend} the {fkind}, {cause}!",
        "But there was no monster. It was {friend} the {fkind}, {cause}.",
    ),
    (
        '"Oh, it is only you!" laughed {hero}. "I am sorry," said {friend}. "I did not want to scare you."',
        "{Hero} laughed so hard that {he} had to sit down, and {friend} laughed too.",
    ),
    (
        "They ate some {food} together and looked at the moon.",
        "After that, {hero} was never afraid of the dark again.",
    ),
)

SEED: Plot = (
    (
        "One spring day, {hero} found {seed} {spot}.",
        'An old woman gave {hero} {seed}. "Take good care of it," she said.',
    ),
    (
        "{He} put it in the ground and gave it water every day.",
        "{He} planted it beside the house and sang to it every morning.",
    ),
    (
        'A week went by, and nothing happened. "It will never grow," said {friend} the {fkind}.',
        '"Why do you wait?" asked {friend} the {fkind}. "There is nothing there."',
    ),
    (
        '"I can wait," said {hero}.',
        "But {hero} did not give up. Rain or shine, {he} was there.",
    ),
    (
        "Then one morning, there was a small green leaf. It grew and grew, and it became {plant}!",
        "And one day it came up. By the end of summer it was {plant}.",
    ),
    ("It gave {gift}.", "Everyone came to see it, for it gave {gift}."),
    (
        '"I was wrong," said {friend}. "Will you teach me how to wait?"',
        "{Hero} picked the best part and gave it to {friend}.",
    ),
)

JOURNEY: Plot = (
    (
        "All {his} life, {hero} had dreamed of seeing {wonder}.",
        '"What is it like to see {wonder}?" {hero} asked every day, but nobody knew.',
    ),
    (
        "So one morning {he} packed some {food} and set off.",
        "So {he} put on {his} boots, took {a_thing}, and walked out of the door.",
    ),
    (
        "{He} walked over the hills and through the woods.",
        "The road was long, and the rain came down.",
        "On the third day, {he} lost {his} way in the fog.",
    ),
    (
        (
            'At a crossing {he} met {friend} the {fkind}. "Where are you going?" asked {friend}. '
            '"To see {wonder}," said {hero}.'
        ),
        "Under a tree sat {friend} the {fkind}, who was lost as well. {FHe} wanted to see {wonder} too.",
    ),
    (
        '"Then let us go together," said {friend}, and the road felt only half as long.',
        "They shared a blanket at night and told each other stories.",
    ),
    (
        "When they came over the last hill, there it was: {wonder}. It was more beautiful than any dream.",
        'At last they were there. "Oh!" said {hero}, and for a long time {he} could not say anything else.',
    ),
    (
        '"The best part was the walk with you," said {hero}.',
        "They stayed until the sun went down, and then they walked home hand in hand.",
    ),
)

PARTY: Plot = (
    (
        "Today was {his} birthday, but nobody said a word about it.",
        'When {hero} woke up on {his} birthday, the house was empty. "Where is everyone?" {he} asked.',
    ),
    (
        '{He} asked {friend} the {fkind}, "Do you want to play?" "Sorry, I am busy," said {friend}, and ran away.',
        "{He} went to see {friend} the {fkind}, but {friend} closed the door very fast.",
    ),
    (
        '"They have all forgotten me," thought {hero}, and a tear ran down {his} nose.',
        "{Hero} walked slowly to the lake and threw stones into the water all by {himself}.",
    ),
    (
        "In the evening {he} came home. All the lights were out.",
        "When the sun went down, {he} opened {his} own front door. It was very dark and very quiet.",
    ),
    (
        '"Surprise!" shouted {friend} and all the others.',
        'Then a hundred candles were lit. "Happy birthday!" everybody shouted, and {friend} was the loudest of all.',
    ),
    (
        "There was {food} for everyone, and {friend} gave {him} {a_thing}.",
        "On the table stood some {food}, and next to it lay a present. It was {a_thing}!",
    ),
    (
        '"This is the best day ever," said {hero}.',
        "They danced and sang until the moon was high.",
    ),
)

# Keyed by what a user would ask for.
PLOTS: dict[str, Plot] = {
    "a lost toy": LOST,
    "learning something new": SKILL,
    "sharing": SHARE,
    "building something": BUILD,
    "telling the truth": MISTAKE,
    "a rescue": RESCUE,
    "a noise in the night": NOISE,
    "a magic seed": SEED,
    "a long journey": JOURNEY,
    "a birthday": PARTY,
}
