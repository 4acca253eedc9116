//! Whose turn it is: a bounded, fair queue in front of a bounded number of places. Pure.
//!
//! ```text
//! enter --> a place is free --> Run            finish --> a place is free again:
//!       --> none is         --> Wait (ticket)             the next caller's oldest item runs
//!       --> queue is full   --> Full           leave  --> a waiting item is given back
//! ```
//!
//! A caller that runs nothing may have a place beyond those that all share ([`QueueLimits::reserved`]):
//! whoever holds all others with long items keeps nobody else waiting until one of them ends. The
//! [`OWNER`] of the machine has one beyond these, and may always have an item that waits.
//!
//! Callers take turns: between two items of one caller, every other caller that waits has one.
//! With places 1 and the arrivals `a1 a2 a3 b1 c1`, the order is `a1 a2 b1 c1 a3`.

use std::collections::VecDeque;

/// How much may run and wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Items that run at once, at least 1.
    pub places: usize,
    /// Items that wait, of all callers together.
    pub waiting: usize,
    /// Items of one caller that wait.
    pub waiting_per_caller: usize,
    /// Items that run beyond `places`, of callers of whom no other runs. One more may be the owner's.
    pub reserved: usize,
}

impl QueueLimits {
    /// Most items that run at once, whoever's they are.
    pub fn most_running(&self) -> usize {
        self.places + self.reserved + 1
    }
}

/// Who asks when the owner of the machine does. No other caller is called so.
pub const OWNER: &str = "owner";

/// Who a caller is, whomever it asks for: its name as far as the first NUL. The rest it may choose, so
/// that no bound rests on it.
pub fn who_of(caller: &str) -> &str {
    caller.split('\0').next().unwrap_or(caller)
}

/// Names a waiting item. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What becomes of an item that arrives.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry<T> {
    /// It runs; [`FairQueue::finish`] must follow.
    Run(T),
    /// It waits.
    Wait(Ticket),
    /// It is refused.
    Full(Refused),
}

/// Why an item may not even wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full.
    Queue,
    /// This caller has as many waiting as one may have.
    Caller,
}

/// The queue and the places.
#[derive(Debug)]
pub struct FairQueue<T> {
    limits: QueueLimits,
    running: usize,
    next: u64,
    /// Callers that wait, the next one first. None of them is empty.
    ring: VecDeque<Line<T>>,
}

#[derive(Debug)]
struct Line<T> {
    caller: String,
    items: VecDeque<(Ticket, T)>,
}

impl<T> FairQueue<T> {
    /// Nothing runs and nothing waits.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits: QueueLimits {
                places: limits.places.max(1),
                ..limits
            },
            running: 0,
            next: 0,
            ring: VecDeque::new(),
        }
    }

    /// Whether a place is free for a caller of whom items run already, or do not (`runs`).
    pub fn has_place(&self, caller: &str, runs: bool) -> bool {
        let runs = runs || self.waiting_for(caller) > 0;
        self.running < self.places_of(caller, runs)
    }

    /// How many may run when one of this caller's is among them.
    fn places_of(&self, caller: &str, runs: bool) -> usize {
        match runs {
            true => self.limits.places,
            false if who_of(caller) == OWNER => self.limits.most_running(),
            false => self.limits.places + self.limits.reserved,
        }
    }

    /// Whether this is the owner, who may have an item that waits, and has none.
    pub fn is_owed(&self, caller: &str) -> bool {
        who_of(caller) == OWNER && self.waiting_for(caller) == 0
    }

    /// An item arrives, of a caller of whom others run, or do not (`runs`).
    pub fn enter(&mut self, caller: &str, runs: bool, item: T) -> Entry<T> {
        // Whoever waits goes first; while someone waits, no place is free that it might have.
        if self.has_place(caller, runs) {
            self.running += 1;
            return Entry::Run(item);
        }
        if self.waiting() >= self.limits.waiting && !self.is_owed(caller) {
            return Entry::Full(Refused::Queue);
        }
        if self.room_of(caller) == 0 {
            return Entry::Full(Refused::Caller);
        }
        let ticket = Ticket(self.next);
        match self.ring.iter_mut().find(|line| line.caller == caller) {
            Some(line) => line.items.push_back((ticket, item)),
            None => self.ring.push_back(Line {
                caller: caller.to_owned(),
                items: VecDeque::from([(ticket, item)]),
            }),
        }
        self.next += 1;
        Entry::Wait(ticket)
    }

    /// A running item has ended. The item that takes its place, if one waits that may; `runs` says
    /// whether items of a caller still run.
    pub fn finish(&mut self, runs: impl Fn(&str) -> bool) -> Option<T> {
        self.running = self.running.saturating_sub(1);
        let caller =
            |line: &Line<T>| self.running < self.places_of(&line.caller, runs(&line.caller));
        let next = self.ring.iter().position(caller)?;
        let mut line = self.ring.remove(next)?;
        self.running += 1;
        let item = line.items.pop_front();
        if !line.items.is_empty() {
            self.ring.push_back(line);
        }
        item.map(|(_, item)| item)
    }

    /// A waiting item gives up. `None` if it runs by now, or has been given up already.
    pub fn leave(&mut self, ticket: Ticket) -> Option<T> {
        for (place, line) in self.ring.iter_mut().enumerate() {
            let Some(at) = line.items.iter().position(|(t, _)| *t == ticket) else {
                continue;
            };
            let item = line.items.remove(at);
            if line.items.is_empty() {
                self.ring.remove(place);
            }
            return item.map(|(_, item)| item);
        }
        None
    }

    /// Everything that waits, to be refused; what runs goes on.
    pub fn clear(&mut self) -> Vec<T> {
        let lines = std::mem::take(&mut self.ring);
        lines
            .into_iter()
            .flat_map(|line| line.items)
            .map(|(_, item)| item)
            .collect()
    }

    /// How many more items of a caller may wait, as far as its own bounds go: of one name, and, where
    /// there is more than one, of all names of a caller, which leaves a quarter to others.
    pub fn room_of(&self, caller: &str) -> usize {
        let line = self.ring.iter().find(|line| line.caller == caller);
        let own = line.map_or(0, |line| line.items.len());
        let room = self.limits.waiting_per_caller.saturating_sub(own);
        let all = self.waiting_for(caller);
        let most = self.limits.waiting - self.limits.waiting / 4;
        match all > own {
            true => room.min(most.saturating_sub(all)),
            false => room,
        }
    }

    /// Items that wait of whoever has this name, whomever for.
    fn waiting_for(&self, caller: &str) -> usize {
        let lines = self.ring.iter();
        let lines = lines.filter(|line| who_of(&line.caller) == who_of(caller));
        lines.map(|line| line.items.len()).sum()
    }

    /// Items that run.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Items that wait.
    pub fn waiting(&self) -> usize {
        self.ring.iter().map(|line| line.items.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns(places: usize, waiting: usize, per_caller: usize) -> FairQueue<(u8, usize)> {
        FairQueue::new(QueueLimits {
            places,
            waiting,
            waiting_per_caller: per_caller,
            reserved: 0,
        })
    }

    #[test]
    fn whoever_runs_nothing_has_a_place_beside_a_caller_who_holds_all_others() {
        let mut turns = FairQueue::new(QueueLimits {
            places: 4,
            waiting: 8,
            waiting_per_caller: 8,
            reserved: 1,
        });
        for n in 0..4 {
            let entry = turns.enter("hog\0one of many", n > 0, n);
            assert!(matches!(entry, Entry::Run(_)));
        }
        // Another name is no other caller.
        assert!(matches!(
            turns.enter("hog\0another", true, 4),
            Entry::Wait(_)
        ));
        assert!(matches!(turns.enter("guest", false, 5), Entry::Run(5)));
        // One place is reserved, not one for each.
        assert!(matches!(turns.enter("late", false, 6), Entry::Wait(_)));
        // It is passed on to who runs nothing, before its turn ...
        assert_eq!(turns.finish(|caller| who_of(caller) == "hog"), Some(6));
        // ... and to nobody else.
        assert_eq!(turns.finish(|caller| who_of(caller) == "hog"), None);
        assert_eq!((turns.running(), turns.waiting()), (4, 1));
        assert_eq!(turns.finish(|_| true), Some(4));
    }

    #[test]
    fn the_owner_of_the_machine_has_a_place_to_run_and_one_to_wait_whoever_holds_the_others() {
        let mut turns = FairQueue::new(QueueLimits {
            places: 2,
            waiting: 2,
            waiting_per_caller: 2,
            reserved: 1,
        });
        for n in 0..5 {
            let entry = turns.enter(&format!("neighbour {n}"), false, n);
            assert!(matches!(entry, Entry::Run(_)) == (n < 3));
        }
        assert!(matches!(
            turns.enter("late", false, 5),
            Entry::Full(Refused::Queue)
        ));
        let own = |more: &str| format!("{OWNER}\0{more}");
        assert!(matches!(turns.enter(&own("a"), false, 6), Entry::Run(6)));
        assert!(matches!(turns.enter(&own("b"), true, 7), Entry::Wait(_)));
        assert!(matches!(
            turns.enter(&own("c"), true, 8),
            Entry::Full(Refused::Queue)
        ));
        // The owner's place stays the owner's: when its item ends, the one that waits has it.
        assert_eq!(turns.finish(|_| false), Some(7));
        // When one of the others ends, the owner's counts among as many as before.
        assert_eq!(turns.finish(|caller| who_of(caller) == OWNER), None);
        assert_eq!((turns.running(), turns.waiting()), (3, 2));
    }

    #[test]
    fn a_caller_of_many_names_leaves_a_quarter_of_the_queue_to_others() {
        let mut turns = turns(1, 8, 8);
        assert!(matches!(turns.enter("hog", false, (0, 0)), Entry::Run(_)));
        let mut entries = (0..20).map(|n| turns.enter(&format!("hog\0{n}"), true, (0, n)));
        assert_eq!(
            entries.position(|entry| matches!(entry, Entry::Full(Refused::Caller))),
            Some(6)
        );
        assert!(matches!(
            turns.enter("guest", false, (1, 0)),
            Entry::Wait(_)
        ));
    }

    #[test]
    fn callers_take_turns_as_the_documentation_says() {
        let mut turns = turns(1, 8, 8);
        let arrivals = [(b'a', 1), (b'a', 2), (b'a', 3), (b'b', 1), (b'c', 1)];
        let mut order = Vec::new();
        for item in arrivals {
            if let Entry::Run(item) = turns.enter(&char::from(item.0).to_string(), false, item) {
                order.push(item);
            }
        }
        while let Some(item) = turns.finish(|_| true) {
            order.push(item);
        }
        let expected = [(b'a', 1), (b'a', 2), (b'b', 1), (b'c', 1), (b'a', 3)];
        assert_eq!(order, expected);
        assert_eq!((turns.running(), turns.waiting()), (0, 0));
    }

    #[test]
    fn a_full_queue_refuses_and_says_whose_limit_it_was() {
        let mut turns = turns(1, 2, 1);
        assert!(matches!(turns.enter("a", true, (0, 0)), Entry::Run(_)));
        assert!(matches!(turns.enter("a", true, (0, 1)), Entry::Wait(_)));
        assert_eq!(turns.enter("a", true, (0, 2)), Entry::Full(Refused::Caller));
        assert!(matches!(turns.enter("b", true, (1, 0)), Entry::Wait(_)));
        assert_eq!(turns.enter("c", true, (2, 0)), Entry::Full(Refused::Queue));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Enter(u8),
        Finish,
        Leave(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..5u8).prop_map(Op::Enter),
            3 => Just(Op::Finish),
            1 => any::<usize>().prop_map(Op::Leave),
        ]
    }

    proptest! {
        /// Against a plain list of what waits, with the rules checked after every step.
        #[test]
        fn limits_hold_nothing_is_lost_and_nobody_is_passed_over(
            places in 1..4usize,
            waiting in 0..7usize,
            per_caller in 0..4usize,
            ops in prop::collection::vec(op(), 0..200),
        ) {
            let mut turns = turns(places, waiting, per_caller);
            let mut running = 0;
            let mut line: Vec<(Ticket, (u8, usize))> = Vec::new();
            // Since which step a caller has been waiting without being served, and when it last was.
            let mut since = [None; 5];
            let mut served = [None; 5];
            for (n, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Enter(caller) => {
                        let item = (caller, n);
                        let own = line.iter().filter(|(_, i)| i.0 == caller).count();
                        match turns.enter(&caller.to_string(), true, item) {
                            Entry::Run(back) => {
                                prop_assert_eq!(back, item);
                                prop_assert!(line.is_empty());
                                running += 1;
                            }
                            Entry::Wait(ticket) => {
                                prop_assert_eq!(running, places);
                                prop_assert!(line.iter().all(|(t, _)| *t != ticket));
                                since[caller as usize].get_or_insert(n);
                                line.push((ticket, item));
                            }
                            Entry::Full(Refused::Queue) => prop_assert_eq!(line.len(), waiting),
                            Entry::Full(Refused::Caller) => prop_assert_eq!(own, per_caller),
                        }
                    }
                    Op::Finish if running > 0 => match turns.finish(|_| true) {
                        None => {
                            prop_assert!(line.is_empty());
                            running -= 1;
                        }
                        Some(item) => {
                            // The oldest of its caller.
                            let at = line.iter().position(|(_, i)| i.0 == item.0).unwrap();
                            prop_assert_eq!(line.remove(at).1, item);
                            let caller = item.0 as usize;
                            for other in (0..5).filter(|other| *other != caller) {
                                if let (Some(waits), Some(last)) = (since[other], served[caller]) {
                                    prop_assert!(waits > last, "{other} was passed over");
                                }
                            }
                            served[caller] = Some(n);
                            since[caller] = line.iter().any(|(_, i)| i.0 == item.0).then_some(n);
                        }
                    },
                    Op::Finish => {}
                    Op::Leave(which) if !line.is_empty() => {
                        let (ticket, item) = line.remove(which % line.len());
                        prop_assert_eq!(turns.leave(ticket), Some(item));
                        prop_assert_eq!(turns.leave(ticket), None);
                        if line.iter().all(|(_, i)| i.0 != item.0) {
                            since[item.0 as usize] = None;
                        }
                    }
                    Op::Leave(_) => prop_assert_eq!(turns.leave(Ticket(u64::MAX)), None),
                }
                prop_assert_eq!(turns.running(), running);
                prop_assert_eq!(turns.waiting(), line.len());
                prop_assert!(running <= places && line.len() <= waiting);
            }
            let mut left: Vec<_> = turns.clear();
            let mut expected: Vec<_> = line.into_iter().map(|(_, item)| item).collect();
            left.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(left, expected);
            prop_assert_eq!(turns.waiting(), 0);
        }
    }
}
