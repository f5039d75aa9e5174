"""Everything that the sweep is tested with: sound code, and bugs on purpose."""

from tests.fuzz import seeded_plays as seeded_plays
from tests.fuzz import seeded_services as seeded_services
from tests.fuzz.seeded_coroutines import FAULTY as FAULTY
from tests.fuzz.seeded_coroutines import SOUND as SOUND
