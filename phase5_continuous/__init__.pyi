from phase5_continuous.policies import ByPriority as ByPriority
from phase5_continuous.policies import FirstComeFirstServed as FirstComeFirstServed
from phase5_continuous.policies import LongestPrefixFirst as LongestPrefixFirst
from phase5_continuous.policies import policy as policy
from phase5_continuous.scheduler import Scheduler as Scheduler
