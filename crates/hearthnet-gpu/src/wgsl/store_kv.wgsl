// Writes the key and the value of each row to its page, rounded to binary16. A thread per pair of
// components, so that no two threads write one word.
struct Params {
    kv_heads: u32, head_dim: u32,
    keys: u32, keys_stride: u32,
    values: u32, values_stride: u32,
    info: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> keys: array<u32>;
@group(0) @binding(2) var<storage, read_write> values: array<u32>;
@group(0) @binding(3) var<storage, read_write> pages: array<u32>;
@group(0) @binding(4) var<storage, read> tables: array<u32>;
@group(0) @binding(5) var<storage, read> info: array<u32>;

@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
    if (2u * g.x >= p.head_dim) { return; }
    let position = info[p.info + 4u * g.z];
    let page = tables[info[p.info + 4u * g.z + 1u] + (position >> 5u)];
    let base = (page * p.kv_heads + g.y) * 32u * p.head_dim;
    let slot = position & 31u;
    let component = g.y * p.head_dim + 2u * g.x;
    let k = p.keys + g.z * p.keys_stride + component;
    let v = p.values + g.z * p.values_stride + component;
    pages[base + key_word(slot, g.x)] = f16_round(keys[k]) | (f16_round(keys[k + 1u]) << 16u);
    pages[base + value_word(p.head_dim, slot, g.x)] = f16_round(values[v]) | (f16_round(values[v + 1u]) << 16u);
}
