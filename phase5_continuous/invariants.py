"""What holds between any two calls of a scheduler. Slow, for tests and for a server told to check itself."""

from phase0_request.request import RequestState
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.seat import Line, Seat


class SchedulerError(RuntimeError):
    """The scheduler contradicts itself or its cache: a fault of the engine."""


def check(scheduler: Scheduler) -> None:
    """Raise SchedulerError or PageError unless everyone is in one place, with what belongs there."""
    cache, residents = scheduler.cache, scheduler.residents
    cache.check()
    usage = cache.usage
    _hold(usage.free + usage.cached + usage.referenced == usage.total, f"pages are lost or counted twice: {usage}")
    lines = {
        RequestState.RUNNING: residents.running,
        RequestState.PREEMPTED: residents.preempted,
        RequestState.WAITING: scheduler.admission.waiting,
    }
    for state, line in lines.items():
        _check_line(state, line)
    everyone = [seat for line in lines.values() for seat in line]
    landing = [seat for seat in scheduler.seats if seat.request.finished]
    _hold(residents.landing == len(landing), f"{residents.landing} are said to land, and {len(landing)} do")
    _hold({*everyone, *landing} == {*scheduler.seats}, "the lines and the seats are not of the same requests")
    _hold(len(everyone) + len(landing) == len(scheduler.seats), "a request stands in two lines")
    _hold(len(residents.running) <= scheduler.admission.max_running, f"{len(residents.running)} are running")
    for seat in residents.running:
        _check_running(scheduler, seat)
    for seat in landing:
        _hold(seat.in_flight > 0, f"request {seat.request.id} has ended and landed, and is here")
    if not residents.running and not landing:
        _hold(usage.referenced == 0, f"nobody runs, and {usage.referenced} pages are held")


def _check_line(state: RequestState, line: Line) -> None:
    seats = list(line)
    _hold([seat.key for seat in seats] == sorted(seat.key for seat in seats), f"the {state.value} are out of order")
    for seat in seats:
        request = seat.request
        _hold(request.state is state, f"request {request.id} is {request.state.value} among the {state.value}")
        if state is not RequestState.RUNNING:
            idle = not (seat.stays or seat.in_flight or seat.planned or request.computed)
            _hold(idle, f"request {request.id} is {state.value} and takes part in steps")


def _check_running(scheduler: Scheduler, seat: Seat) -> None:
    request, residents, page = seat.request, scheduler.residents, scheduler.cache.page_size
    place = f"request {request.id}: computed {request.computed}, planned {seat.planned}, known {seat.known}"
    _hold(request.computed <= seat.planned <= seat.known <= request.total + seat.in_flight, place)
    _hold(seat.in_flight > 0 or seat.planned == request.computed, place)
    _hold(seat.planned <= seat.room == len(scheduler.cache.table(request)) * page, f"{place}, room {seat.room}")
    _hold(seat.room < seat.limit + page, f"{place}: it holds pages that it can never need")
    _hold(seat.stays != (residents.leaving is seat), f"request {request.id} both leaves and stays, or neither")


def _hold(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SchedulerError(otherwise)
