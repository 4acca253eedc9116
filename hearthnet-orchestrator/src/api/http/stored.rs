//! Conversations of responses, in memory, for requests that refer to them. Pure.

use std::collections::VecDeque;

use serde_json::Value;

/// Limits of stored responses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Number, and bytes of text: of all clients.
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// Number, and bytes of text: of one client.
    pub(super) count_of_client: usize,
    pub(super) bytes_of_client: usize,
}

/// A conversation of 32,000 tokens has some 128 KiB, and each response of it is stored: 64 turns of
/// it fit.
pub(super) const LIMITS: Limits = Limits {
    count: 1024,
    bytes: 64 << 20,
    count_of_client: 256,
    bytes_of_client: 16 << 20,
};

/// Stored responses, the oldest first.
pub(super) struct StoredResponses {
    limits: Limits,
    all: VecDeque<Stored>,
    bytes: usize,
}

struct Stored {
    /// Verified identity, with which a limit counts.
    client: String,
    /// Key of a caller's conversations; no other key finds the response.
    held_by: String,
    id: String,
    /// Messages as JSON.
    text: String,
}

impl Stored {
    /// Bytes that a client has chosen.
    fn bytes(&self) -> usize {
        self.text.len() + self.held_by.len()
    }
}

impl StoredResponses {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            all: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Messages of the response `id`.
    pub(super) fn get(&self, held_by: &str, id: &str) -> Option<Vec<Value>> {
        let is_it = |stored: &&Stored| stored.held_by == held_by && stored.id == id;
        let stored = self.all.iter().find(is_it)?;
        serde_json::from_str(&stored.text).ok()
    }

    /// Stores the messages of a response. The oldest ones make room: first the client's own.
    pub(super) fn put(&mut self, client: String, held_by: String, id: String, messages: &[Value]) {
        let stored = Stored {
            client,
            held_by,
            id,
            text: Value::from(messages.to_vec()).to_string(),
        };
        let (limits, new) = (self.limits, stored.bytes());
        if new > limits.bytes_of_client {
            return;
        }
        let is_own = |other: &Stored| other.client == stored.client;
        let own = self.all.iter().filter(|other| is_own(other));
        let (mut count, mut bytes) = own.fold((1, new), |(count, bytes), other| {
            (count + 1, bytes + other.bytes())
        });
        while count > limits.count_of_client || bytes > limits.bytes_of_client {
            let oldest = self.all.iter().position(is_own);
            let Some(dropped) = oldest.and_then(|oldest| self.all.remove(oldest)) else {
                break;
            };
            count -= 1;
            bytes -= dropped.bytes();
            self.bytes -= dropped.bytes();
        }
        self.bytes += new;
        self.all.push_back(stored);
        while self.all.len() > limits.count || self.bytes > limits.bytes {
            let Some(dropped) = self.all.pop_front() else {
                break;
            };
            self.bytes -= dropped.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn store() -> StoredResponses {
        StoredResponses::new(Limits {
            count: 4,
            bytes: 400,
            count_of_client: 2,
            bytes_of_client: 300,
        })
    }

    fn put(store: &mut StoredResponses, client: &str, id: &str, text: &str) {
        let messages = [json!({"role": "user", "content": text})];
        store.put(client.into(), format!("{client} key"), id.into(), &messages);
    }

    fn has(store: &StoredResponses, client: &str, id: &str) -> bool {
        store.get(&format!("{client} key"), id).is_some()
    }

    #[test]
    fn only_the_caller_finds_its_response() {
        let mut store = store();
        put(&mut store, "a", "1", "hi");
        let messages = store.get("a key", "1").unwrap();
        assert_eq!(messages, [json!({"role": "user", "content": "hi"})]);
        assert!(store.get("b key", "1").is_none());
        assert!(store.get("a key", "2").is_none());
    }

    #[test]
    fn a_client_replaces_its_own_oldest_responses() {
        let mut store = store();
        put(&mut store, "b", "0", "");
        for id in ["1", "2", "3"] {
            put(&mut store, "a", id, "");
        }
        let left = ["1", "2", "3"].map(|id| has(&store, "a", id));
        assert_eq!(left, [false, true, true]);
        assert!(has(&store, "b", "0"));
        // By bytes as well, and what is too large alone is not stored.
        put(&mut store, "a", "4", &"x".repeat(240));
        assert!(has(&store, "a", "4") && !has(&store, "a", "3"));
        put(&mut store, "a", "5", &"x".repeat(400));
        assert!(has(&store, "a", "4") && !has(&store, "a", "5"));
    }

    #[test]
    fn all_clients_together_have_a_limit() {
        let mut store = store();
        for client in ["a", "b", "c", "d", "e"] {
            put(&mut store, client, "1", "");
        }
        assert!(!has(&store, "a", "1") && has(&store, "e", "1"));
        put(&mut store, "f", "1", &"x".repeat(250));
        assert!(store.bytes <= 400);
        assert!(has(&store, "f", "1"));
        let bytes: usize = store.all.iter().map(Stored::bytes).sum();
        assert_eq!(bytes, store.bytes);
    }
}
