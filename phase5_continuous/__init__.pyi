from phase5_continuous.core import EngineCore as EngineCore
from phase5_continuous.core import Step as Step
from phase5_continuous.policies import ByPriority as ByPriority
from phase5_continuous.policies import FirstComeFirstServed as FirstComeFirstServed
from phase5_continuous.policies import LongestPrefixFirst as LongestPrefixFirst
from phase5_continuous.policies import policy as policy
from phase5_continuous.scheduler import Scheduler as Scheduler
