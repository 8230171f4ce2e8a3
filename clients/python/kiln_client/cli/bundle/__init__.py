"""Commands about bundles: `kiln bundles …` and `kiln config …`."""
