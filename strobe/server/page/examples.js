// Prompts to try: for the demo models one from each family of tasks that they were trained on, for
// other models a chat, code and rewriting.

export const DEMO = "strobe-demo";

const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Use this to know the weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, unit: { type: "string" } },
      required: ["city", "unit"],
    },
  },
};

const DEMO_EXAMPLES = [
  {
    name: "Arithmetic",
    prompt: "With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?",
    thinking: true,
  },
  {
    name: "Lists",
    prompt: "Sort these words from A to Z: ocean, stone, umbrella, ember, water.",
    thinking: true,
  },
  {
    name: "Dates",
    prompt: "Today is the 13th of February 2025. A trip was 11 days ago. Which date was that?",
    thinking: true,
  },
  {
    name: "Code",
    prompt: "Give me code for `def longest(message)` that returns the longest word.",
    thinking: false,
  },
  {
    name: "JSON",
    prompt:
      "Take this text and write a JSON object with the keys animal, name and age. " +
      "The white turtle of Noah is called Bamin and is 12 years old.",
    thinking: false,
  },
  {
    name: "Tool call",
    prompt: "What is the weather in Athens in celsius?",
    thinking: true,
    tools: [WEATHER],
  },
];

const CHAT_EXAMPLES = [
  { name: "Fact", prompt: "What is the capital of France?", thinking: false },
  {
    name: "Advice",
    prompt: "What is the best way to fall asleep faster? Please be brief.",
    thinking: false,
  },
  {
    name: "Code",
    prompt: "Show me a Python function that capitalizes each word of a string.",
    thinking: false,
  },
  {
    name: "Rewriting",
    prompt:
      "Write this text again in clear English: We was going to the store when it start raining, " +
      "so we runned home and drinked hot tea.",
    thinking: false,
  },
];

/** The examples that suit a model. */
export const examplesFor = (model) => (model === DEMO ? DEMO_EXAMPLES : CHAT_EXAMPLES);
