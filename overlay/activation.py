"""placeholder"""


def activate() -> None:
    print("activate")
