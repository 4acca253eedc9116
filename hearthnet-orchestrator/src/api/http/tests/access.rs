//! Access: keys, host names, origins of pages, and pages themselves.

use hearthnet_http::{KeyLimits, NamedKey, NamedKeys};

use super::*;

#[test]
fn with_an_api_key_other_requests_are_refused() {
    let key = ApiKey::new(" sixteen-bytes-or-more\n");
    let house = house_with(settings(1, 1, 1), |http| http.api_key = key);
    for wrong in [
        "",
        "Authorization: Bearer nope\r\n",
        "Authorization: Basic sixteen-bytes-or-more\r\n",
    ] {
        let reply = house.get("/v1/models", wrong);
        assert_eq!(reply.error().1, "invalid_api_key");
        assert_eq!(reply.headers["www-authenticate"], "Bearer");
    }
    let right = "Authorization: Bearer sixteen-bytes-or-more\r\n";
    assert_eq!(house.get("/v1/models", right).status, 200);
    assert_eq!(house.get("/metrics", "").status, 401);
    // The status is public; the load needs the key.
    let health = house.get("/healthz", "");
    assert_eq!(
        (health.status, health.json()),
        (200, json!({"status": "ok"}))
    );
    assert_eq!(house.get("/healthz", right).json()["running"], 0);
    assert!(ApiKey::new("too short").is_none());
    assert!(ApiKey::new("long enough, but with spaces").is_none());
}

#[test]
fn the_key_is_read_from_each_header_that_clients_use() {
    let house = open_by_key();
    for (headers, status) in [
        ("", 401),
        (BEARER, 200),
        ("api-key: 0123456789abcdef\r\n", 200),
        ("x-api-key: 0123456789abcdef\r\n", 200),
        ("x-api-key: 0123456789abcdeF\r\n", 401),
        // Only the first one counts.
        (
            "x-api-key: 0123456789abcdef\r\nAuthorization: Bearer 0123456789abcdeF\r\n",
            401,
        ),
    ] {
        assert_eq!(house.get("/v1/models", headers).status, status, "{headers}");
    }
}

#[test]
fn a_named_key_has_limits_and_turns_of_its_own_and_changes_nothing() {
    let named = |name: &str, key: &str, requests| NamedKey {
        name: name.to_owned(),
        key: ApiKey::new(key).unwrap(),
        limits: KeyLimits {
            requests,
            ..KeyLimits::default()
        },
    };
    let (one, other, owners) = (
        "one-one-one-one-one",
        "other-other-other",
        "owner-owner-owner",
    );
    let all = vec![named("one", one, Some(1)), named("other", other, None)];
    let keys = NamedKeys::watch("/nowhere".into(), move || Ok(all.clone())).unwrap();
    let house = house_with(settings(1, 8, 8), |http| {
        http.api_key = ApiKey::new(owners);
        http.named_keys = Some(keys.clone());
    });
    let bearer = |key: &str| format!("Authorization: Bearer {key}\r\n");
    let head = |key: &str| format!("{CLOSE}{}", bearer(key));
    let running = house.begin_at_the_gate(&head(owners));
    let waiting = [one, other, other].map(|key| {
        let before = house.fixture.service.load().waiting;
        let stream = house.begin(json!({}), &head(key));
        house
            .fixture
            .until("it waits", |load, _| load.waiting == before + 1);
        stream
    });
    let refused = rest(house.begin(json!({}), &head(one)));
    let code = "rate_limit_exceeded".to_owned();
    assert_eq!(refused.error(), (429, code, String::new()));
    assert!(refused.retry_after() >= 1);
    house.fixture.gate.set(false);
    assert!(
        std::iter::once(running)
            .chain(waiting)
            .all(|it| rest(it).status == 200)
    );
    let uses = keys.uses();
    assert_eq!(
        (uses[0].requests, uses[0].refused, uses[0].running),
        (1, 1, 0)
    );
    assert_eq!((uses[1].requests, uses[1].refused), (2, 0));
    assert!(uses[0].tokens > 12 && uses[1].tokens == 2 * uses[0].tokens);

    let change = |key: &str| {
        let reply = house.post_with("/hearthnet/v1/pause", &json!({}), &bearer(key));
        reply.error()
    };
    assert_eq!(
        (change(one).0, change(one).1.as_str()),
        (403, "unauthorized")
    );
    // This server has no such path.
    assert_eq!(change(owners).0, 404);
    assert_eq!(change("another-key-of-many").0, 401);
}

#[test]
fn without_a_key_other_machines_and_other_names_are_not_served() {
    let fixture = fixture(settings(1, 1, 1));
    let everywhere = HttpSettings {
        listen: "0.0.0.0:0".into(),
        ..HttpSettings::default()
    };
    let start = serve(fixture.service.clone(), None, Router::new(), &everywhere);
    let refused = fixture.runtime.block_on(start).err();
    assert!(matches!(refused, Some(HttpError::KeyNeeded(_))));
    let house = house(fixture, HttpSettings::default());
    for (host, status) in [
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("LOCALHOST:7602", 200),
        ("127.0.0.1", 200),
        ("[::1]:7602", 200),
    ] {
        let reply = house.send("GET /v1/models", host, "");
        assert_eq!(reply.status, status, "{host}");
    }
    // An absolute request target overrides the `Host` header.
    let elsewhere = house.get("http://evil.example/v1/models", "");
    assert_eq!(elsewhere.status, 403);
}

#[test]
fn a_listed_host_name_is_served_and_similar_ones_are_not() {
    let house = house_with(settings(1, 1, 1), |http| {
        http.allowed_hosts = vec!["host.docker.internal".into()];
    });
    for (host, status) in [
        ("host.docker.internal", 200),
        ("Host.Docker.Internal:7602", 200),
        ("localhost", 200),
        ("evil.host.docker.internal", 403),
        ("host.docker.internal.evil.example", 403),
        ("host.docker.internal@evil.example", 403),
        ("evil@host.docker.internal", 403),
        ("docker.internal", 403),
    ] {
        let reply = house.send("GET /v1/models", host, "");
        assert_eq!(reply.status, status, "{host}");
    }
}

#[test]
fn a_listed_origin_may_use_the_api_and_others_may_not() {
    let house = house_with(settings(2, 4, 4), |http| {
        http.api_key = ApiKey::new(KEY);
        http.cors_origins = vec!["http://app.example:3000".into()];
    });
    let send = |line: &str, headers: &str| house.send(line, "127.0.0.1", headers);
    let listed = "Origin: http://app.example:3000\r\nSec-Fetch-Site: cross-site\r\n";
    let other = "Origin: http://app.example\r\nSec-Fetch-Site: cross-site\r\n";
    let asks = "Access-Control-Request-Method: POST\r\n\
                Access-Control-Request-Headers: authorization,content-type\r\n";
    let chat = "OPTIONS /v1/chat/completions";
    let allowed = send(chat, &format!("{listed}{asks}"));
    assert_eq!(allowed.status, 204);
    let header = |name: &str| allowed.headers[name].as_str();
    assert_eq!(
        header("access-control-allow-origin"),
        "http://app.example:3000"
    );
    assert_eq!(
        header("access-control-allow-headers"),
        "authorization,content-type"
    );
    assert_eq!(header("vary"), "origin");
    let models = send("GET /v1/models", &format!("{listed}{BEARER}"));
    assert_eq!(models.status, 200);
    assert!(models.headers.contains_key("access-control-allow-origin"));
    // The page's script can read why it is refused.
    let keyless = send("GET /v1/models", listed);
    assert_eq!(keyless.status, 401);
    assert!(keyless.headers.contains_key("access-control-allow-origin"));
    for (line, headers) in [
        (chat, format!("{other}{asks}{BEARER}")),
        ("GET /v1/models", format!("{other}{BEARER}")),
        ("GET /metrics", format!("{listed}{BEARER}")),
        ("POST /hearthnet/v1/pause", format!("{listed}{BEARER}")),
    ] {
        let refused = send(line, &headers);
        assert_eq!(refused.error().1, "forbidden_origin", "{line}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"));
    }
}

/// Pages of a test.
static PAGES: [hearthnet_http::Page; 1] = [hearthnet_http::Page {
    path: "/",
    kind: "text/html; charset=utf-8",
    bytes: b"<!doctype html><title>page</title>",
}];

#[test]
fn a_page_needs_no_key_is_cached_by_its_content_and_opens_by_address_only() {
    let key = "a-key-of-sixteen-bytes-or-more";
    let house = house_with(settings(1, 1, 1), |http| {
        http.pages = &PAGES;
        http.api_key = ApiKey::new(key);
    });
    let page = house.get("/", "");
    assert_eq!((page.status, page.body.as_bytes()), (200, PAGES[0].bytes));
    let policy = &page.headers["content-security-policy"];
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"));
    for (name, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("cache-control", "no-cache"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        assert_eq!(page.headers[name], value);
    }
    let tag = format!("If-None-Match: {}\r\n", page.headers["etag"]);
    let again = house.get("/", &tag);
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    assert_eq!(house.get("/", "If-None-Match: \"other\"\r\n").status, 200);
    // Everything else needs the key.
    assert_eq!(house.get("/v1/models", "").status, 401);
    let at = |host: &str| house.send("GET /", host, "");
    assert_eq!(at("192.168.0.9:7602").status, 200);
    assert_eq!(at("evil.example").error().1, "forbidden_host");

    let local = house_with(settings(1, 1, 1), |http| http.pages = &PAGES);
    assert_eq!(local.get("/", "").status, 200);
    let lan = local.send("GET /", "192.168.0.9", "");
    assert_eq!(lan.error().1, "forbidden_host");
    let cross = local.get("/v1/models", "Sec-Fetch-Site: cross-site\r\n");
    assert_eq!(cross.error().1, "forbidden_origin");
}

#[test]
fn an_ipv6_network_is_one_caller_whose_machines_are_kept_apart() {
    let at = |text: &str| Client::new(text.parse().unwrap(), None, 1);
    let bounds = |client: &Client| who(client, true);
    let (one, other) = (at("2001:db8::1"), at("2001:db8::2"));
    assert_eq!(bounds(&one), bounds(&other));
    assert_ne!(bounds(&one), bounds(&at("2001:db8:0:1::1")));
    assert_ne!(bounds(&at("192.168.1.1")), bounds(&at("192.168.1.2")));
    let [one, other] = [one, other].map(|client| caller(&client, true, "ann"));
    assert_eq!(one.principal.identity, other.principal.identity);
    assert_ne!(one.principal, other.principal);
    assert_ne!(one.held_by, other.held_by);
}
