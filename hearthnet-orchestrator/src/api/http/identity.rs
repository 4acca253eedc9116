//! Identity of clients, verified: for limits, turns and kept prefixes. Pure.

use hearthnet_http::Client;

use crate::service::Caller;
use crate::service::fair_queue::{OWNER, Principal};

/// Verified identity of a client: a named key, a user of this machine, or an address (an IPv6
/// network). A local client with the owner's key is the owner. No part of it is chosen by the client.
pub(super) fn who(client: &Client, has_key: bool) -> String {
    if let Some(key) = &client.key {
        return format!("key {}", key.name());
    }
    match client.user {
        Some(user) if user.is_owner => OWNER.to_owned(),
        Some(user) => format!("user {}", user.id),
        None if has_key && client.ip.is_loopback() => OWNER.to_owned(),
        None => format!("address {}", client.subscriber),
    }
}

/// Caller for the service: the verified identity, and the user that the client names.
pub(super) fn caller(client: &Client, has_key: bool, user: &str) -> Caller {
    let identity = who(client, has_key);
    // A client chooses its address within its IPv6 network. A key is one caller everywhere.
    let user_there = match client.user.is_some() || client.key.is_some() || identity == OWNER {
        true => user.to_owned(),
        false => format!("{}\0{user}", client.ip),
    };
    // The number of cached tokens reveals earlier prompts. Without a key, any user of this machine
    // may connect over TCP, so the prefix cache is bound to the connection.
    let held_by = match has_key || client.user.is_some() {
        true => format!("{identity}\0{user_there}"),
        false => format!("connection {}\0{user}", client.number),
    };
    // Keys take turns, whatever users a program names behind one.
    let user = match client.key {
        Some(_) => String::new(),
        None => user_there,
    };
    Caller {
        principal: Principal { identity, user },
        held_by,
    }
}
