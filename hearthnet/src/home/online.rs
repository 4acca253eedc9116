//! Hours of the last seven days in which this node ran: the first hour and a bitmap, in the data
//! directory.

use std::io;
use std::path::Path;

use hearthnet_platform::regular_file;
use hearthnet_platform::whole_file::{self, Access};

const ONLINE_FILE: &str = "online.bits";

/// Hours of seven days.
const HOURS: u64 = 7 * 24;
const BITMAP: usize = HOURS as usize / 8;
/// First hour of 2025, before any release of this program: an earlier clock was not set.
const EARLIEST: u64 = 482_136;
/// Bytes of the file: the latest and the first hour, little-endian, and the bitmap.
const BYTES: usize = 16 + BITMAP;

/// Bits of the hours since 1970, modulo seven days.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Online {
    latest: u64,
    /// First hour; `u64::MAX` if there is none.
    first: u64,
    bits: [u8; BITMAP],
}

impl Default for Online {
    fn default() -> Self {
        Self {
            latest: 0,
            first: u64::MAX,
            bits: [0; BITMAP],
        }
    }
}

impl Online {
    /// Records that the node runs in this hour since 1970. Returns false if that was known, or if the
    /// clock is not set.
    pub(crate) fn note(&mut self, hour: u64) -> bool {
        if hour < EARLIEST {
            return false;
        }
        // A clock that was this far ahead has overwritten all hours.
        if self.latest.saturating_sub(hour) >= HOURS {
            *self = Self::default();
        }
        // If the clock was set back, the hours after it have not happened.
        let (low, high) = (hour.min(self.latest), hour.max(self.latest));
        match high - low {
            HOURS.. => self.bits = [0; BITMAP],
            _ => (low..high).for_each(|before| self.set(before.saturating_add(1), false)),
        }
        let is_new = self.latest != hour || !self.has(hour);
        self.latest = hour;
        self.first = self.first.min(hour);
        self.set(hour, true);
        is_new
    }

    /// Share of the last seven days, or of the time since the first hour if that is shorter, in
    /// thousandths.
    pub(crate) fn permille(&self) -> u16 {
        let hours: u32 = self.bits.iter().map(|byte| byte.count_ones()).sum();
        let of = self.latest.saturating_sub(self.first).saturating_add(1);
        let permille = u64::from(hours) * 1000 / of.min(HOURS);
        u16::try_from(permille.min(1000)).unwrap_or(1000)
    }

    /// The file's content; a missing or damaged file is an empty bitmap.
    pub(crate) fn read(dir: &Path) -> Self {
        let bytes = regular_file::read(&dir.join(ONLINE_FILE), BYTES as u64);
        bytes
            .ok()
            .and_then(|bytes| Self::decode(&bytes))
            .unwrap_or_default()
    }

    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let hours = [self.latest.to_le_bytes(), self.first.to_le_bytes()].concat();
        let bytes = [&hours[..], &self.bits[..]].concat();
        whole_file::replace(&dir.join(ONLINE_FILE), &bytes, Access::Owner)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (latest, rest) = bytes.split_first_chunk()?;
        let (first, bits) = rest.split_first_chunk()?;
        Some(Self {
            latest: u64::from_le_bytes(*latest),
            first: u64::from_le_bytes(*first),
            bits: bits.try_into().ok()?,
        })
    }

    /// Index of the byte, and mask of the bit.
    fn place(hour: u64) -> (usize, u8) {
        let bit = hour % HOURS;
        ((bit / 8) as usize, 1 << (bit % 8))
    }

    fn has(&self, hour: u64) -> bool {
        let (index, mask) = Self::place(hour);
        self.bits.get(index).is_some_and(|byte| byte & mask != 0)
    }

    fn set(&mut self, hour: u64, ran: bool) {
        let (index, mask) = Self::place(hour);
        if let Some(byte) = self.bits.get_mut(index) {
            match ran {
                true => *byte |= mask,
                false => *byte &= !mask,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Node that ran in these hours, one after the other.
    fn ran(hours: impl IntoIterator<Item = u64>) -> Online {
        let mut online = Online::default();
        for hour in hours {
            online.note(hour);
        }
        online
    }

    /// An hour of 2025.
    const T: u64 = 490_000;

    #[test]
    fn only_the_last_seven_days_count() {
        assert_eq!(ran([]).permille(), 0);
        assert_eq!(ran(T..T + 500).permille(), 1000);
        // Half of a week, then half of a week away, then back.
        assert_eq!(ran((T..T + 84).chain([T + 168])).permille(), 500);
        assert_eq!(ran((T..T + 84).chain([T + 251])).permille(), 1000 / 168);
        assert_eq!(ran((T..T + 84).chain([T + 9_999])).permille(), 1000 / 168);
    }

    #[test]
    fn a_new_node_counts_from_its_first_hour() {
        assert_eq!(ran([T]).permille(), 1000);
        assert_eq!(ran([T, T + 3]).permille(), 500);
        assert_eq!(ran(T..T + 84).permille(), 1000);
    }

    #[test]
    fn each_hour_is_new_once() {
        let mut online = ran([T]);
        assert!(!online.note(T));
        assert!(online.note(T + 1));
    }

    #[test]
    fn a_clock_that_jumps_leaves_no_hours_of_the_future() {
        assert_eq!(
            ran((T..T + 100).chain([T + 49])).permille(),
            ran(T..T + 50).permille()
        );
    }

    #[test]
    fn a_clock_that_was_wrong_costs_a_node_no_share_once_it_is_right() {
        // A machine without a battery for its clock starts in 1970, each time.
        let starts = [0, 1, T, 2, T + 1];
        assert_eq!(ran(starts), ran([T, T + 1]));
        assert!(!ran([]).note(EARLIEST - 1));
        // The clock was years ahead: the hours before are lost, and the node begins anew.
        let ahead = (T..T + 100).chain([u64::MAX, T + 100]);
        assert_eq!(ran(ahead), ran([T + 100]));
        assert_eq!(ran([T + 100]).permille(), 1000);
    }

    #[test]
    fn the_bitmap_survives_in_its_directory_and_damage_empties_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Online::read(dir.path()), Online::default());
        let online = ran(490_000..490_010);
        online.write(dir.path()).unwrap();
        assert_eq!(Online::read(dir.path()), online);
        for damaged in [&b""[..], &[1; BYTES - 1], &[1; BYTES + 1]] {
            std::fs::write(dir.path().join(ONLINE_FILE), damaged).unwrap();
            assert_eq!(Online::read(dir.path()), Online::default());
        }
    }
}
