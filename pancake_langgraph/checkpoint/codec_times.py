"""Dates, times and time zones on the wire."""

from __future__ import annotations

import datetime as dt
import zoneinfo

from pancake_langgraph._errors import StateTypeError
from pancake_langgraph.checkpoint.codec_wire import Code, Ext, Read, Reader, Write, Writer, pack, typed


def _write_datetime(writer: Writer, value: dt.datetime, depth: int) -> Ext:
    day = [value.year, value.month, value.day]
    return Ext(Code.DATETIME, pack(day + _clock(writer, value, depth)))


def _write_time(writer: Writer, value: dt.time, depth: int) -> Ext:
    return Ext(Code.TIME, pack(_clock(writer, value, depth)))


def _clock(writer: Writer, value: dt.datetime | dt.time, depth: int) -> list[object]:
    zone = None if value.tzinfo is None else writer.wrap(value.tzinfo, depth)
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, zone]


def _read_datetime(reader: Reader, data: bytes) -> object:
    year, month, day, hour, minute, second, microsecond, fold, zone = reader.sequence(data)
    return dt.datetime(typed(year, int), month, day, hour, minute, second, microsecond, zone, fold=fold)


def _read_time(reader: Reader, data: bytes) -> object:
    hour, minute, second, microsecond, fold, zone = reader.sequence(data)
    return dt.time(typed(hour, int), minute, second, microsecond, zone, fold=fold)


def _write_date(writer: Writer, value: dt.date, depth: int) -> Ext:
    return Ext(Code.DATE, pack([value.year, value.month, value.day]))


def _read_date(reader: Reader, data: bytes) -> object:
    year, month, day = reader.sequence(data)
    return dt.date(typed(year, int), month, day)


def _write_timedelta(writer: Writer, value: dt.timedelta, depth: int) -> Ext:
    return Ext(Code.TIMEDELTA, pack([value.days, value.seconds, value.microseconds]))


def _read_timedelta(reader: Reader, data: bytes) -> object:
    days, seconds, microseconds = reader.sequence(data)
    return dt.timedelta(typed(days, int), typed(seconds, int), typed(microseconds, int))


def _write_timezone(writer: Writer, value: dt.timezone, depth: int) -> Ext:
    offset = value.utcoffset(None)
    # A name that was given is kept; one that was not is made of the offset.
    name = None if value.tzname(None) == dt.timezone(offset).tzname(None) else value.tzname(None)
    return Ext(Code.TIMEZONE, pack([offset.days, offset.seconds, offset.microseconds, name]))


def _read_timezone(reader: Reader, data: bytes) -> object:
    days, seconds, microseconds, name = reader.sequence(data)
    offset = dt.timedelta(typed(days, int), typed(seconds, int), typed(microseconds, int))
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _write_zone(writer: Writer, value: zoneinfo.ZoneInfo, depth: int) -> Ext:
    if value.key is None:
        raise writer.refusal(zoneinfo.ZoneInfo, "it was read from a file and has no key. Use `ZoneInfo(key)`")
    return Ext(Code.ZONE_INFO, pack(value.key))


def _read_zone(reader: Reader, data: bytes) -> object:
    key = typed(reader.load(data), str)
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise StateTypeError(
            f"channel {reader.channel!r}: this machine does not know the time zone {key[:80]!r}; install `tzdata`"
        ) from error


#: How to write a value, by its exact type.
WRITES: dict[type, Write] = {
    dt.datetime: _write_datetime,
    dt.time: _write_time,
    dt.date: _write_date,
    dt.timedelta: _write_timedelta,
    dt.timezone: _write_timezone,
    zoneinfo.ZoneInfo: _write_zone,
}

#: How to read a payload, by its code.
READS: dict[int, Read] = {
    Code.DATETIME: _read_datetime,
    Code.DATE: _read_date,
    Code.TIME: _read_time,
    Code.TIMEDELTA: _read_timedelta,
    Code.TIMEZONE: _read_timezone,
    Code.ZONE_INFO: _read_zone,
}
