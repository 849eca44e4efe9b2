"""Environments in which the right action depends on an earlier observation.

Their functions are pure and handle one episode; `jax.vmap` maps them over streams.

Dims: X numbers observed, S suits, K newest cards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

ROOM = 5  # rows and columns of the room in `search`
BUMP = -0.1  # the reward of an action that a wall blocks in `t_maze`
SUITS = 4  # of the cards in `repeat_previous`


class Environment(NamedTuple):
    """Functions for one episode, and the sizes of observations and actions.

    begin: key -> (state, seen_X), starts an episode.
    step: (key, state, action) -> (state, seen_X, reward, over).
    """

    begin: Callable[[Array], tuple[Any, Array]]
    step: Callable[[Array, Any, Array], tuple[Any, Array, Array, Array]]
    observed: int  # X
    actions: int


class Maze(NamedTuple):
    """The arm that is rewarded, 0 or 1, and the agent's place in the corridor."""

    cue: Array
    place: Array


def t_maze(length: int) -> Environment:
    """Returns a corridor that ends at a junction (Bakker 2001).

    The observation is a cue, 1 or -1 at the start and 0 elsewhere, and whether this is
    the junction, `length` steps on. Action 0 moves forward; 1 and 2 turn, which ends
    the episode at the junction: the arm of the cue earns 1, the other one -1. In the
    corridor a turn meets a wall, and so does a step forward at the junction.
    """

    def observe(maze: Maze) -> Array:
        cue = jnp.where(maze.place == 0, 2 * maze.cue - 1, 0)
        return jnp.stack([cue, maze.place == length]).astype(jnp.float32)

    def begin(key: Array) -> tuple[Maze, Array]:
        maze = Maze(jax.random.randint(key, (), 0, 2), jnp.zeros((), jnp.int32))
        return maze, observe(maze)

    def step(key: Array, maze: Maze, action: Array) -> Any:
        turns, ends = action > 0, maze.place == length
        over = turns & ends
        arm = jnp.where(action - 1 == maze.cue, 1.0, -1.0)
        reward = jnp.where(over, arm, jnp.where(turns == ends, 0.0, BUMP))
        maze = maze._replace(place=maze.place + (~turns & ~ends))
        return maze, observe(maze), reward, over

    return Environment(begin, step, observed=2, actions=3)


class Chain(NamedTuple):
    """The bit to remember, and the number of actions taken."""

    context: Array
    time: Array


def memory_chain(length: int) -> Environment:
    """Returns bsuite's memory chain with one bit (Osband et al. 2020).

    The observation is the share of the time that is left, the number of the bit to name
    (always 0), and the bit, 1 or -1 at first and 0 later. The last of `length` actions
    earns 1 if it names the bit, otherwise -1.
    """

    def observe(chain: Chain) -> Array:
        context = jnp.where(chain.time == 0, 2 * chain.context - 1, 0)
        return jnp.stack([1 - chain.time / length, jnp.zeros(()), context])

    def begin(key: Array) -> tuple[Chain, Array]:
        chain = Chain(jax.random.randint(key, (), 0, 2), jnp.zeros((), jnp.int32))
        return chain, observe(chain)

    def step(key: Array, chain: Chain, action: Array) -> Any:
        over = chain.time == length - 1
        reward = jnp.where(action == chain.context, 1.0, -1.0) * over
        chain = chain._replace(time=chain.time + 1)
        return chain, observe(chain), reward, over

    return Environment(begin, step, observed=3, actions=2)


class Room(NamedTuple):
    """Two cells by number, row by row, and the number of actions taken."""

    goal: Array
    cell: Array
    time: Array


def search(length: int) -> Environment:
    """Returns a square room with a hidden goal, to be found again and again.

    The observation is the agent's row and column, one-hot, and where in the 3 x 3 cells
    around it the goal is. Reaching the goal earns 1 and moves the agent to another
    cell; the goal stays until the episode ends, after `length` actions: up, down, left
    and right. Walls stop the agent.
    """
    cells = ROOM * ROOM

    def place(cell: Array) -> Array:
        return jnp.stack([cell // ROOM, cell % ROOM])

    def observe(room: Room) -> Array:
        row, column = place(room.goal) - place(room.cell) + 1
        near = jax.nn.one_hot(row, 3)[:, None] * jax.nn.one_hot(column, 3)
        one_hot = jax.nn.one_hot(place(room.cell), ROOM)
        return jnp.concatenate([one_hot.ravel(), near.ravel()])

    def elsewhere(key: Array, goal: Array) -> Array:
        return (goal + jax.random.randint(key, (), 1, cells)) % cells

    def begin(key: Array) -> tuple[Room, Array]:
        keys = jax.random.split(key)
        goal = jax.random.randint(keys[0], (), 0, cells)
        room = Room(goal, elsewhere(keys[1], goal), jnp.zeros((), jnp.int32))
        return room, observe(room)

    def step(key: Array, room: Room, action: Array) -> Any:
        moves = jnp.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
        row, column = jnp.clip(place(room.cell) + moves[action], 0, ROOM - 1)
        cell = row * ROOM + column
        at_goal = cell == room.goal
        cell = jnp.where(at_goal, elsewhere(key, room.goal), cell)
        room = Room(room.goal, cell, room.time + 1)
        return room, observe(room), at_goal.astype(jnp.float32), room.time == length

    return Environment(begin, step, observed=2 * ROOM + 9, actions=4)


class Deck(NamedTuple):
    """How many cards of each suit are left, and the newest suits, oldest first."""

    left_S: Array
    newest_K: Array


def repeat_previous(length: int) -> Environment:
    """Returns POPGym's RepeatPrevious (Morad et al. 2023) with k = `length`.

    The observation is the suit of the newest card, one-hot. Once `length` cards have
    been dealt, every action earns or costs the same: it must name the first suit of
    the newest `length`. The episode ends with the last card, with a return of 1 if all
    were right and -1 if all were wrong. POPGym's Easy, Medium and Hard are 4, 32 and 64
    with 1, 2 and 3 decks of 52 cards.
    """
    cards = 52 * (1 + length // 32)

    def deal(key: Array, deck: Deck) -> tuple[Deck, Array]:
        suit = jax.random.categorical(key, jnp.log(deck.left_S))
        seen_X = jax.nn.one_hot(suit, SUITS)
        newest_K = jnp.append(deck.newest_K[1:], suit)
        return Deck(deck.left_S - seen_X, newest_K), seen_X

    def begin(key: Array) -> tuple[Deck, Array]:
        full_S = jnp.full(SUITS, cards / SUITS)
        return deal(key, Deck(full_S, jnp.zeros(length, jnp.int32)))

    def step(key: Array, deck: Deck, action: Array) -> Any:
        counts = cards - deck.left_S.sum() >= length
        right = jnp.where(action == deck.newest_K[0], 1.0, -1.0)
        deck, seen_X = deal(key, deck)
        over = deck.left_S.sum() == 0
        return deck, seen_X, right * counts / (cards - length), over

    return Environment(begin, step, observed=SUITS, actions=SUITS)


ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "t_maze": t_maze,
    "memory_chain": memory_chain,
    "search": search,
    "repeat_previous": repeat_previous,
}
