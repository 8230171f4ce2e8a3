import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm

from edge.access.key_set import MAX_KEYS, KeySet
from tests.servers.tokens import KEY_MAKERS, SigningKey


def parse(*keys: Any) -> KeySet:
    return KeySet.parse(json.dumps({"keys": keys}).encode())


@pytest.mark.parametrize("algorithm", list(KEY_MAKERS))
@pytest.mark.parametrize("states_algorithm", [True, False])
def test_a_key_has_one_algorithm(algorithm: str, states_algorithm: bool) -> None:
    key = SigningKey("a", algorithm)
    if not states_algorithm:
        del key.jwk["alg"], key.jwk["use"]
    keys = parse(key.jwk)
    for other in KEY_MAKERS:
        found = keys.find("a", other)
        assert (found is not None) == (other == algorithm)
        assert found is None or found.algorithm_name == algorithm
    assert keys.find("b", algorithm) is None


def test_a_token_without_key_id_finds_the_only_key_of_its_algorithm() -> None:
    keys = parse(SigningKey("a").jwk, SigningKey("b").jwk, SigningKey("c", "ES256").jwk)
    assert keys.find(None, "EdDSA") is None
    found = keys.find(None, "ES256")
    assert found is not None
    assert found.key_id == "c"


def test_keys_of_one_id_differ_in_their_algorithm() -> None:
    keys = parse(SigningKey("a").jwk, SigningKey("a", "ES256").jwk)
    assert keys.find("a", "EdDSA") is not keys.find("a", "ES256")


def other_curve() -> dict[str, Any]:
    private = ec.generate_private_key(ec.SECP384R1())
    return ECAlgorithm(ECAlgorithm.SHA384).to_jwk(private.public_key(), as_dict=True)


@pytest.mark.parametrize(
    "left_out",
    [
        other_curve(),
        {**SigningKey("a").jwk, "use": "enc"},
        {**SigningKey("a").jwk, "alg": "ES256"},
        {**SigningKey("a", "RS256").jwk, "alg": "PS256"},
        {"kty": "new"},
        {},
    ],
)
def test_keys_for_other_purposes_are_left_out(left_out: dict[str, Any]) -> None:
    assert len(parse(SigningKey("b").jwk, left_out).keys) == 1
    with pytest.raises(ValueError, match="no key for signatures by EdDSA, ES256, RS256"):
        parse(left_out)


def secret_keys() -> list[dict[str, Any]]:
    return [
        HMACAlgorithm.to_jwk(b"0" * 32, as_dict=True),
        OKPAlgorithm.to_jwk(KEY_MAKERS["EdDSA"](), as_dict=True),
        RSAAlgorithm.to_jwk(KEY_MAKERS["RS256"](), as_dict=True),
    ]


@pytest.mark.parametrize("secret", secret_keys(), ids=["shared", "EdDSA", "RS256"])
def test_secret_keys_are_refused_and_not_told(secret: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keys\[1\]: it is secret") as caught:
        parse(SigningKey().jwk, secret)
    assert str(secret.get("d", secret.get("k"))) not in str(caught.value)


def test_weak_keys_are_refused() -> None:
    weak = SigningKey("weak", "RS256", rsa.generate_private_key(public_exponent=65537, key_size=1024))
    with pytest.raises(ValueError, match=r"keys\[0\]: it has 1024 bits; accepted: at least 2048"):
        parse(weak.jwk)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"{}", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"keys": 1}', "no list"),
        (json.dumps({"keys": [{}] * (MAX_KEYS + 1)}).encode(), f"at most {MAX_KEYS}"),
        (b'{"keys": [1]}', r"keys\[0\]: it is no JSON object"),
        (b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "AA"}]}', r"keys\[0\]: it is malformed"),
        (b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "AA", "kid": 1}]}', "`kid` is no text"),
        (b'{"keys": []}', "no key for signatures"),
    ],
)
def test_mistakes_are_named(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeySet.parse(data)
