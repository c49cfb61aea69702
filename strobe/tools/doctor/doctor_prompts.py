"""The doctor's prompts: everyday tasks of several kinds that any chat model can answer."""

PROMPTS = (
    "Each of 7 boxes holds 12 pears. Besides, Tara has 13 single pears. What is the total number "
    "of pears?",
    "There are 54 people on a bus. 41 people leave at a stop and 6 new people join. How many "
    "people are there at the end?",
    "Take the list 87, 90, 85, 69, 39, 52, 9 and keep all numbers larger than 30.",
    "Take the list apple, wind, beach, ladder, olive and write it in reverse order.",
    "Today is Wednesday. Which day of the week is it in 8 days?",
    "Take the date 3 September 2040 and write it as YYYY-MM-DD.",
    "Show me the Python code of `is_even(number)`, a function that returns True if the input is "
    "even.",
    "Wanda books 3 nights without breakfast in a hotel in Toronto, room 42.\nWrite city, nights, "
    "breakfast and room of this text as JSON.",
)
