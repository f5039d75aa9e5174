"""Everything that the sweep is tested with: sound code, and bugs on purpose."""

from tests.programmes import seeded_plays as seeded_plays
from tests.programmes import seeded_services as seeded_services
from tests.programmes.seeded_coroutines import FAULTY as FAULTY
from tests.programmes.seeded_coroutines import SOUND as SOUND
