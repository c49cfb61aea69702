"""The small target model and drafter that ship with Strobe, and the tasks they learned."""
