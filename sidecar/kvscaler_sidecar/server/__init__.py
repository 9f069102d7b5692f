"""The OpenAI API and the pages for probes, scrapers and operators."""
